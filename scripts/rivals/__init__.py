"""Tree algorithms of other systems, as rules that choose which candidates to attach. The rules need only numpy."""
