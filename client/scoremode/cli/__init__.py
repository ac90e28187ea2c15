"""`ppl-client`: the main program, and one module per command with its options, its run and its output."""
