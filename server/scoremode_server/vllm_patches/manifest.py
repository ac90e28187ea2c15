"""What Scoremode uses of vLLM that vLLM does not promise to keep: all that is replaced, wrapped, overridden or private.

`manifest.json` beside this file has a hash of each one's source text for every supported version, and of every name
that Scoremode imports from vLLM. `scripts/check_vllm.py VERSION --write` writes it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

HASHES_FILE = Path(__file__).with_name("manifest.json")

Hashes = dict[str, dict[str, str | None]]
"""Version -> "module:name" -> hash of the source text, None where that version has no such name."""


@dataclass(frozen=True, slots=True)
class Private:
    """One name. `name` is dotted inside the module, such as `Class.method`; `why` says what is done with it."""

    module: str
    name: str
    why: str

    @property
    def key(self) -> str:
        """Its key in `manifest.json`."""
        return f"{self.module}:{self.name}"


def recorded_hashes() -> Hashes:
    """The content of `manifest.json`."""
    hashes: Hashes = json.loads(HASHES_FILE.read_text(encoding="utf-8"))
    return hashes


def _of(module: str, names: dict[str, str]) -> list[Private]:
    return [Private(module, name, why) for name, why in names.items()]


PRIVATE: tuple[Private, ...] = (
    # The API server: what arrives from the engine stays arrays.
    *_of(
        "vllm.v1.engine.logprobs",
        {
            "LogprobsProcessor.from_new_request": "wrapped: requests of ours get a processor that keeps arrays",
            "LogprobsProcessor._update_prompt_logprobs": "wrapped: takes the arrays of requests of ours as they are",
            "LogprobsProcessor.update_from_output": "calls _update_prompt_logprobs",
            "LogprobsProcessor.pop_prompt_logprobs": "hands the arrays on, which are no list, in streamed outputs",
            "LogprobsProcessor._correct_decoded_token": "called: text of a token that ends within a character",
        },
    ),
    *_of(
        "vllm.v1.engine.detokenizer",
        {
            "IncrementalDetokenizer.from_new_request": "wrapped: only the prompt's end is decoded for the last token",
            "uses_fast_detokenizer": "called: decides which of two decoders vLLM takes, so that we take the same",
            "FastIncrementalDetokenizer.__init__": "reads the shortened prompt of a wrapped request",
            "SlowIncrementalDetokenizer.__init__": "reads the shortened prompt of a wrapped request",
        },
    ),
    # The API server: methods of the engine after which cached rows may be wrong.
    *_of(
        "vllm.v1.engine.async_llm",
        {
            f"AsyncLLM.{method}": "wrapped: cached rows are dropped before and after it"
            for method in (
                "reset_prefix_cache",
                "sleep",
                "wake_up",
                "release_kv_cache_memory",
                "add_lora",
                "remove_lora",
                "start_weight_update",
                "update_weights",
                "finish_weight_update",
                "update_weight_version",
                "collective_rpc",
            )
        },
    ),
    *_of(
        "vllm.config.parallel",
        {"ParallelConfig._api_process_count": "read: with several API servers, weights may change unheard"},
    ),
    # The API server: our completions are answered with the parts of vLLM's handler.
    *_of(
        "vllm.entrypoints.openai.completion.serving",
        {
            "OpenAIServingCompletion.__init__": "sets what is read: the default sampling parameters, the override",
            "OpenAIServingCompletion._create_completion": "not called: our handler does the same for what scores",
            "OpenAIServingCompletion.render_completion_request": "called, or done without decoding token prompts",
            "OpenAIServingCompletion.request_output_to_completion_response": "called: all of a response but logprobs",
            "OpenAIServingCompletion._create_completion_logprobs": "not called: we write the same from arrays",
        },
    ),
    *_of(
        "vllm.entrypoints.openai.completion.api_router",
        {
            "create_completion": "replaced as a route, and called for requests that do not score",
            "ENDPOINT_LOAD_METRICS_FORMAT_HEADER_LABEL": "read: the header that asks for load metrics",
        },
    ),
    *_of(
        "vllm.entrypoints.generate.base.serving",
        {
            "GenerateBaseServing._preflight": "called: the engine's health, before anything is tokenized",
            "GenerateBaseServing._get_data_parallel_rank": "called: option of generate()",
            "GenerateBaseServing._get_priority": "called: option of generate()",
            "GenerateBaseServing._get_session_id": "called: option of generate()",
            "GenerateBaseServing._raise_if_error": "called: the error of a request that the engine gave up",
            "GenerateBaseServing._with_kv_transfer_rejection_cleanup": "called around our handler, as around vLLM's",
        },
    ),
    *_of(
        "vllm.entrypoints.serve.engine.serving",
        {
            "BaseServing.__init__": "called: our look-up of model names is a subclass",
            "BaseServing._base_request_id": "called: ids of completions",
            "BaseServing._check_model": "called: refuses model names that are not served",
            "BaseServing._maybe_get_adapters": "called: the LoRA adapter that a request names",
            "BaseServing._get_trace_headers": "called: option of generate()",
            "BaseServing._log_inputs": "called: vLLM's log of requests",
            "BaseServing._extract_prompt_components": "called: the token ids of a prompt",
            "BaseServing._extract_prompt_len": "called: prompt length, for the default of max_tokens",
            "BaseServing._extract_prompt_text": "called: text of a prompt, to be echoed",
        },
    ),
    *_of(
        "vllm.sampling_params",
        {
            "SamplingParams.clone": "keeps the type, which marks a scoring request",
            "SamplingParams.skip_reading_prefix_cache": "set: whether cached positions may be left out",
        },
    ),
    # The command line.
    *_of(
        "vllm.entrypoints.cli.serve",
        {
            "ServeSubcommand.subparser_init": "called: `scoremode serve` is this subcommand with a default changed",
            "ServeSubcommand.validate": "called, as vLLM's main does",
            "ServeSubcommand.cmd": "called, as vLLM's main does",
        },
    ),
    *_of("vllm.entrypoints.serve.utils.api_utils", {"cli_env_setup": "called before vLLM's server starts, on 0.32"}),
    *_of("vllm.entrypoints.common.startup", {"cli_env_setup": "called before vLLM's server starts, from 0.33 on"}),
    # Workers: prompt logprobs within a budget of memory.
    *_of(
        "vllm.v1.worker.worker_base",
        {"WorkerWrapperBase.init_device": "wrapped: the model runners are patched when a worker has its device"},
    ),
    *_of(
        "vllm.v1.worker.gpu_model_runner",
        {
            "GPUModelRunner._get_prompt_logprobs_dict": "replaced: in chunks that fit the budget, NaN if not computed",
            "GPUModelRunner._dummy_sampler_run": "wrapped: one chunk is computed while vLLM profiles",
            "GPUModelRunner._sync_device": "called when copies to the host must have ended",
        },
    ),
    *_of("vllm.v1.worker.cpu_model_runner", {"CPUModelRunner._sync_device": "called, on a CPU, in its place"}),
    *_of(
        "vllm.v1.worker.gpu_input_batch",
        {
            "CachedRequestState.in_progress_prompt_logprobs_cpu": "written: rows of a prompt that spans steps",
            "CachedRequestState.prompt_token_ids": "read: the targets",
            "CachedRequestState.num_computed_tokens": "read: the first row of a step",
        },
    ),
    *_of("vllm.v1.outputs", {"LogprobsTensors": "made and unpacked: fields and their order"}),
    *_of(
        "vllm.v1.sample.sampler",
        {
            "Sampler.compute_logprobs": "called on each chunk",
            "Sampler.gather_logprobs": "called on each chunk",
        },
    ),
    *_of(
        "vllm.v1.worker.gpu.model_runner",
        {
            "GPUModelRunner.load_model": "wrapped: rows of a chunk are set once the model is known",
            "GPUModelRunner._dummy_sampler_run": "wrapped: one chunk is computed while vLLM profiles",
        },
    ),
    *_of(
        "vllm.v1.worker.gpu.sample.prompt_logprob",
        {
            "CHUNK_SIZE": "replaced: rows that fit the budget",
            "compute_prompt_logprobs_with_chunking": "replaced: logprobs from one pass over the logits",
            "PromptLogprobsWorker.compute_prompt_logprobs": "calls the function above, looked up in its module",
            "PromptLogprobsWorker.compute_prompt_token_id_logprobs": "reads CHUNK_SIZE, looked up in its module",
        },
    ),
    # Workers: the projection onto the vocabulary, of which each tensor-parallel rank keeps its own part.
    *_of(
        "vllm.model_executor.layers.logits_processor",
        {
            "LogitsProcessor.forward": "its arguments and output are observed by a hook",
            "LogitsProcessor._get_logits": "calls _gather_logits, and cuts off what is padding",
            "LogitsProcessor._gather_logits": "replaced on one object, for one call: the logits of this rank alone",
        },
    ),
    *_of(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        {"VocabParallelEmbedding.__init__": "sets what is read: tp_rank, tp_size, num_embeddings_per_partition"},
    ),
)
