"""Tables and figures of the documents, made from committed result files. No torch: a check takes a moment."""
