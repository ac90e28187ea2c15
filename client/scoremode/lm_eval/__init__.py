"""`python -m scoremode.lm_eval`: lm-eval's own command line with the model `scoremode`, a Scoremode server."""
