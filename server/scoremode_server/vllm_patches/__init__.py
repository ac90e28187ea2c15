"""Everything that depends on vLLM's private parts, of which `private.toml` is the record. `versions` decides whether
Scoremode runs on the installed vLLM, and `install` puts the patches in place. Packages above import from here.
"""
