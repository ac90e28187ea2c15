"""Everything that depends on vLLM's private parts, and the record of which these are.

`manifest` lists them, `versions` decides whether the installed vLLM is one that Scoremode runs on, and `source` finds
a name's source text without importing it. Patches of vLLM belong here as well.

`scoring`, `prefix_cache`, `completions` and the entry points (`plugin`, `cli`, `scoremode_server.enable`) may import
from here; nothing here imports them. `scripts/check_vllm.py` imports `source` and `manifest`, which need no vLLM.
"""
