"""The door to vLLM's engine (`engine`), which computes each shared prefix once: requests in score mode (`run`), rows in
memory (`store`) by block hashes (`block_hashes`), and requests that wait for each other (`in_flight`, `request`).

`scoring`, `completions`, `offline` and `app` import from here.
"""
