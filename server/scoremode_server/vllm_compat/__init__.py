"""Private parts of vLLM, of which `private.toml` is the record. `versions` decides whether Scoremode runs on the
installed vLLM, and `install` puts the patches in place, those of the model runners in `worker` too.
"""
