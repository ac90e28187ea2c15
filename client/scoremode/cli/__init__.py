"""Implements `ppl-client`: the main program, and one module per command with the command's options, work and output."""
