"""Block heads (DFlash), which draft all tokens of a block in one pass."""
