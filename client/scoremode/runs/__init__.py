"""Measures models on texts, records references and exports them, as `ppl-client` does, from Python. The package has the
runs over a text's windows, their journals and results, and the pools of servers that they use."""

from scoremode.runs.answers import record_answers
from scoremode.runs.calibration import DEFAULT_THRESHOLD, Calibration, FinishedRun, Overlap, measure_overlap
from scoremode.runs.card_file import front_matter, newline_of, read_card, with_block
from scoremode.runs.corpora import (
    DEFAULT_COLUMN,
    DEFAULT_SPLIT,
    HUB_ALIASES,
    PROMPT_COLUMNS,
    Corpus,
    load_corpus,
    load_prompts,
    local_path,
    read_file,
    read_rows,
)
from scoremode.runs.divergence import ComparedModel, DivergentToken, KldMeasurement, measure_kld, measure_noise_floor
from scoremode.runs.evaluate import Evaluation, evaluate
from scoremode.runs.expert_routes import ClusteredMean, ExpertRoutes
from scoremode.runs.export import OnBytes, export_llama_cpp
from scoremode.runs.journal import AppendedFile, Journal, Measurement, check_same_run, open_locked
from scoremode.runs.lanes import in_lane, lane_difference, range_of
from scoremode.runs.layers import (
    LEAST_WINDOWS,
    Cost,
    LayersMeasurement,
    PartCost,
    PartKind,
    few_windows,
    measure_layers,
    shares,
)
from scoremode.runs.lines import json_lines
from scoremode.runs.output import (
    ARRAYS_SUFFIX,
    JOURNAL_SUFFIX,
    Output,
    read_run,
    run_kind,
    sync_folder,
    write_together,
    write_whole,
)
from scoremode.runs.parity import HISTOGRAM_EDGES, ParityRun, measure_parity, pair_of
from scoremode.runs.parity_tables import parity_as_text, parity_tables
from scoremode.runs.plan import Plan, WindowNlls, identity, server_header, tokenize_texts
from scoremode.runs.pool import DEFAULT_CONCURRENCY, MAX_CONCURRENCY, Job, Pool, patient_client
from scoremode.runs.presets import CATEGORIES, PRESETS, Preset, comparable_with, window_settings
from scoremode.runs.ratios import AGAIN
from scoremode.runs.recipe import Recipe, make_recipe, tensor_bytes
from scoremode.runs.recording import Recording, record_reference
from scoremode.runs.report import RECORD_VERSION, Arrays, chat_differences, reference_in_words, weights_in_words
from scoremode.runs.rollouts import COLUMNS, TEMPERATURES, RolloutColumns
from scoremode.runs.run import OnProgress, Progress

__all__ = [
    "AGAIN",
    "ARRAYS_SUFFIX",
    "CATEGORIES",
    "COLUMNS",
    "DEFAULT_COLUMN",
    "DEFAULT_CONCURRENCY",
    "DEFAULT_SPLIT",
    "DEFAULT_THRESHOLD",
    "HISTOGRAM_EDGES",
    "HUB_ALIASES",
    "JOURNAL_SUFFIX",
    "LEAST_WINDOWS",
    "MAX_CONCURRENCY",
    "PRESETS",
    "PROMPT_COLUMNS",
    "RECORD_VERSION",
    "TEMPERATURES",
    "AppendedFile",
    "Arrays",
    "Calibration",
    "ClusteredMean",
    "ComparedModel",
    "Corpus",
    "Cost",
    "DivergentToken",
    "Evaluation",
    "ExpertRoutes",
    "FinishedRun",
    "Job",
    "Journal",
    "KldMeasurement",
    "LayersMeasurement",
    "Measurement",
    "OnBytes",
    "OnProgress",
    "Output",
    "Overlap",
    "ParityRun",
    "PartCost",
    "PartKind",
    "Plan",
    "Pool",
    "Preset",
    "Progress",
    "Recipe",
    "Recording",
    "RolloutColumns",
    "WindowNlls",
    "chat_differences",
    "check_same_run",
    "comparable_with",
    "evaluate",
    "export_llama_cpp",
    "few_windows",
    "front_matter",
    "identity",
    "in_lane",
    "json_lines",
    "lane_difference",
    "load_corpus",
    "load_prompts",
    "local_path",
    "make_recipe",
    "measure_kld",
    "measure_layers",
    "measure_noise_floor",
    "measure_overlap",
    "measure_parity",
    "newline_of",
    "open_locked",
    "pair_of",
    "parity_as_text",
    "parity_tables",
    "patient_client",
    "range_of",
    "read_card",
    "read_file",
    "read_rows",
    "read_run",
    "record_answers",
    "record_reference",
    "reference_in_words",
    "run_kind",
    "server_header",
    "shares",
    "sync_folder",
    "tensor_bytes",
    "tokenize_texts",
    "weights_in_words",
    "window_settings",
    "with_block",
    "write_together",
    "write_whole",
]
