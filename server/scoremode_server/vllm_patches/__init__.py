"""Everything that depends on vLLM's private parts, and the record of which these are.

`private.toml` lists them and `manifest` reads it. `versions` decides whether the installed vLLM is one that Scoremode
runs on, and `source` finds a name's source text without importing it. `install` puts the patches in place: of the model
runners (`runner_v1`, `runner_v2`, with `profiling` and `lm_head`) and of the API server's `output_processor`.
`weight_changes` and `served_models` use private parts and replace none.

Everything above may import from here; nothing here imports it. `scripts/check_vllm.py` imports `source` and `manifest`,
which need no vLLM.
"""
