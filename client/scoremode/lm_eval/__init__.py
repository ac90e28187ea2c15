"""`python -m scoremode.lm_eval`: lm-eval's own command line, with a Scoremode server as the model `scoremode`."""
