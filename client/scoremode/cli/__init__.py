"""`ppl-client`: its main program, and for each command its options, its run and what it prints."""
