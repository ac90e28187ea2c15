"""Uses of vLLM's private parts, all listed in `private.toml`. `versions` decides whether Scoremode runs on the
installed vLLM, and `install` applies the patches, including those of the model runners in `worker`.
"""
