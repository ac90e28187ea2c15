"""Answers to prompts: how they are asked for, kept, resumed and recorded, and what is refused beforehand."""

import json
import re

import httpx
import pyarrow
import pyarrow.parquet
import pytest
from fake_server import BOS, INFO, MAX_MODEL_LEN, QUESTION, AnsweringServer, client_of, compare, error

from scoremode import CorpusError, NotFoundError, OutputError, ResponseError, TransportError, measure_kld
from scoremode.runs import load_prompts, record_answers
from scoremode.runs.answers import AnswersPlan
from scoremode.wire import ServerInfo
from scoremode.wire.references import AnswerSettings
from tests import largest_uses as largest

ANSWER = {"role": "assistant", "content": "I."}
SETTINGS = AnswerSettings(max_new_tokens=6)
ROWS = [{"prompt": "ab"}, {"prompt": "-"}, {"prompt": "cde"}]
"""The answer to the second is empty."""


@pytest.fixture
def server() -> AnsweringServer:
    return AnsweringServer()


def prompts_of(tmp_path, rows=ROWS, **options):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts(path, **options)


async def recorded(server, tmp_path, settings=SETTINGS, rows=ROWS, **options):
    async with client_of(server) as client:
        prompts = prompts_of(tmp_path, rows)
        return await record_answers(client, prompts, "base", settings, folder=tmp_path, concurrency=1, **options)


async def test_an_empty_answer_keeps_its_place_with_length_0(tmp_path, server, caplog):
    await recorded(server, tmp_path, routes=True)
    assert server.references["base"].request["routes"]
    assert "1 of 3 rows of prompts.jsonl, column prompt have an empty answer, which keeps its place" in caplog.text
    assert not list(tmp_path.glob("*.journal"))
    server.noise = 2.0
    async with client_of(server) as client:
        measurement = await measure_kld(client, "base")
    parts = [compare(*window, 2.0) for window in server.references["base"].windows]
    first, last = ([*(part.top_token_ids == part.token_ids), False].index(False) for part in parts)
    assert measurement.record([])["agreement_lengths"] == [first, 0, last]


async def test_a_request_leaves_no_parameter_to_the_models_files(tmp_path, server):
    await recorded(server, tmp_path)
    assert server.asked[0] == {
        "prompt": [BOS, *b"ab"],
        "max_tokens": 6,
        "return_token_ids": True,
        "temperature": 0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "min_tokens": 0,
        "ignore_eos": False,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "watermarking": False,
    }
    sampling = AnsweringServer()
    await recorded(sampling, tmp_path, AnswerSettings(max_new_tokens=6, temperature=1, seed=5))
    assert [(each["temperature"], each["seed"]) for each in sampling.asked] == [(1, 5), (1, 6), (1, 7)]


async def test_an_interrupted_recording_resumes(tmp_path, server):
    server.allowed = 2
    with pytest.raises(TransportError):
        await recorded(server, tmp_path)
    journal = tmp_path / "base.answers.journal"
    assert journal.read_bytes().count(b"\n") == 3
    for other in (
        {"settings": AnswerSettings(max_new_tokens=7)},
        {"rows": [*ROWS[:2], {"prompt": "xyz"}]},
        {"server": AnsweringServer(info={"fingerprint": "another"})},
    ):
        with pytest.raises(OutputError, match="belongs to another run"):
            await recorded(**{"server": server, "tmp_path": tmp_path, **other})
    whole = journal.read_bytes()
    # Half of a pair, which UTF-8 cannot hold.
    journal.write_bytes(whole.replace(b'"text": "', b'"text": "\\ud800', 1))
    with pytest.raises(OutputError, match="damaged at line 2"):
        await recorded(server, tmp_path)
    journal.write_bytes(whole)
    server.allowed, server.requests = 10, []
    await recorded(server, tmp_path)
    assert [each["prompt"] for each in server.asked] == [[BOS, *b"cde"]]
    assert not journal.exists()
    # Again, nothing is generated, and a journal that a killed command left is removed.
    journal.write_text("left")
    await recorded(server, tmp_path)
    assert (len(server.asked), journal.exists()) == (1, False)
    with pytest.raises(OutputError, match="other settings of answers"):
        await recorded(server, tmp_path, AnswerSettings(max_new_tokens=7))
    with pytest.raises(OutputError, match="other settings of answers or routes"):
        await recorded(server, tmp_path, routes=True)
    server.references["base"].recorded = {0}
    with pytest.raises(OutputError, match="its answers are not in"):
        await recorded(server, tmp_path)


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
HAS_TEMPLATE = {"chat_template_fingerprint": "a"}


@pytest.mark.parametrize(
    ("rows", "info", "message"),
    [
        ([*ROWS, {"prompt": "a" * (MAX_MODEL_LEN - 6)}], {}, "row 4 of prompts.jsonl has 59 tokens"),
        (
            [{"messages": [QUESTION]}, {"messages": [{"role": "user", "content": "no"}]}],
            *({}, "row 2 .*cannot be a prompt"),
        ),
        (
            [{"messages": [QUESTION]}, {"messages": [QUESTION, CALLING, ANSWER, QUESTION | {"tool_calls": [5]}]}],
            *(HAS_TEMPLATE, r"row 2 of prompts.jsonl cannot be a prompt: messages\[0\]\[1\].tool_calls"),
        ),
        # No recording can have all answers.
        *(
            (ROWS, {"bounds": bounds}, message)
            for bounds, message in (
                ({"sequences": 2}, r"has 3 prompts, and the server records at most 2 \(--max-request-sequences\)"),
                ({"lists": 3 * 3 + 1}, "records at most 2"),
                (
                    {"recording_bytes": 4600},
                    "3 prompts with answers of 6 tokens can have 4,.* takes 4,600: .*-request-b",
                ),
            )
        ),
    ],
)
async def test_no_answer_is_generated_if_a_prompt_cannot_have_one(tmp_path, rows, info, message):
    server = AnsweringServer(info=info)
    with pytest.raises(CorpusError, match=message):
        await recorded(server, tmp_path, rows=rows)
    assert not server.asked


@pytest.mark.parametrize(("text", "kept"), [("t" * 9, "t" * 9), ("t" * 9000, "")])
async def test_texts_that_are_too_long_for_a_recording_are_left_out(tmp_path, caplog, text, kept):
    server = AnsweringServer(info={"bounds": {"recording_bytes": 5000}})
    server.text = text
    await recorded(server, tmp_path)
    [body] = server.sent("/v1/references")[1:]
    assert [each["text"] for each in body["answers"]["data"]] == [kept] * 3
    assert len(httpx.Request("POST", "http://a", json=body).content) <= 5000
    assert ("recorded without their texts" in caplog.text) == (kept == "")


@pytest.mark.parametrize(
    ("number", "prompt", "answer"),
    [(largest.PROMPTS, largest.PROMPT_TOKENS, largest.ANSWER_TOKENS), (largest.SEQUENCES, 20, 20)],
)
def test_the_largest_answers_are_asked_for(tmp_path, number, prompt, answer):
    """At a server with the bounds that it publishes by default."""
    info = ServerInfo.model_validate(
        {**INFO, "vocab_size": largest.TOKEN_ID + 1, "bounds": {"recording_bytes": 64 * 2**20, "lists": 2**18}}
    )
    prompts, settings = [largest.tokens(prompt)] * number, AnswerSettings(max_new_tokens=answer)
    AnswersPlan(info, "bytes", prompts_of(tmp_path), prompts, settings).check_bounds()


async def test_a_server_that_has_a_template_renders_prompts_itself(tmp_path):
    """vLLM's own route refuses calls of tools as transformers has them."""
    server, chat = AnsweringServer(info=HAS_TEMPLATE), [QUESTION, CALLING, {"role": "tool", "content": "Two."}]
    await recorded(server, tmp_path, rows=[{"messages": chat, "tools": [CALL]}])
    assert server.sent("/v1/turns") == [{"messages": chat, "tools": [CALL], "add_generation_prompt": True}]
    assert server.asked[0]["prompt"] == [1, 2]


async def test_answers_of_a_model_that_stops_elsewhere_are_not_taken_for_its_own(tmp_path, server, caplog):
    """The fingerprint does not depend on generation_config.json."""
    await recorded(server, tmp_path)
    server.references["base"].described = {"stop_token_ids": [1, 2], "chat_template_fingerprint": "a"}
    await recorded(server, tmp_path)
    server.info["stop_token_ids"] = [1]
    with pytest.raises(OutputError, match="with another model"):
        await recorded(server, tmp_path)
    server.info |= {"stop_token_ids": [100, 1], "chat_template_fingerprint": "b"}
    async with client_of(server) as client:
        await measure_kld(client, "base")
    assert [re.split(",|: if", text)[0] for text in caplog.messages if "bytes" in text] == [
        "bytes continues after token 2",
        "bytes stops after token 100",
        "bytes has another chat template than bytes",
    ]


async def test_no_answer_is_generated_without_a_folder_for_references(tmp_path, server):
    with pytest.raises(NotFoundError, match="no folder"):
        await recorded(
            lambda request: error(404, "no folder") if "references" in request.url.path else server(request), tmp_path
        )
    assert not server.asked


@pytest.mark.parametrize(("reason", "message"), [("length", "--generation-config vllm"), ("abort", "reason 'abort'")])
async def test_an_answer_that_the_server_cuts_is_refused(tmp_path, server, reason, message):
    server.finish_reason = reason
    with pytest.raises(ResponseError, match=message):
        await recorded(server, tmp_path)


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"messages": [QUESTION, ANSWER], "prompt": "text"}, {}),
        ({"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I."}]}, {}),
        ({"prompt": [QUESTION]}, {}),
        ({"conversations": None, "prompt": None, "messages": [QUESTION]}, {}),
        ({"messages": "text", "chat": json.dumps([QUESTION])}, {"messages": "chat"}),
    ],
)
async def test_a_prompt_is_a_conversation_without_its_last_answer(tmp_path, row, options):
    corpus = prompts_of(
        tmp_path, [{**row, "lang": "de"}, {**row, "lang": None}, row], by="lang", num_samples=2, **options
    )
    assert [each.messages for each in corpus.conversations] == [[QUESTION]] * 2
    assert (corpus.labels, corpus.num_rows, corpus.info.by) == (("de", "(no label)"), 2, "lang")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path := tmp_path / "prompts.parquet")
    assert load_prompts(path, **options).conversations == corpus.conversations[:1]


@pytest.mark.parametrize("absent", [{"messages": None}, {"messages": None, "conversations": []}])
def test_columns_without_a_value_in_any_row_count_as_absent(tmp_path, absent):
    """As a table has them that was joined from several sets."""
    rows = [{**absent, "prompt": text} for text in ("one", "two")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path := tmp_path / "prompts.parquet")
    assert prompts_of(tmp_path, rows).documents == load_prompts(path).documents == ("one", "two")


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": "a"}], {}, "messages, conversations, prompt"),
        ([], {}, "messages, conversations, prompt"),
        ([{"prompt": "a"}, {"prompt": None}], {}, "row 2 .*column 'prompt' is not text but null"),
        ([{"messages": None}], {}, "no value in any of the columns messages, conversations, prompt"),
        ([{"messages": [QUESTION]}, {"messages": None, "prompt": "a"}], {}, "row 2 .*column 'messages' is null"),
        ([{"prompt": "a"}, {"messages": None}], {}, "row 2 .*column 'prompt' is not text but null"),
        ([{"prompt": "a", "chat": None}] * 2, {"messages": "chat"}, "column 'chat' of prompts.jsonl is null in every"),
        ([{"prompt": "a", "lang": None}] * 2, {"by": "lang"}, "column 'lang' of prompts.jsonl is null in every row"),
        ([{"messages": [ANSWER]}], {}, "row 1 .*has no message before the assistant's answer"),
        ([{"messages": [QUESTION]}, {"messages": "?"}], {}, "row 2 .*is not a list of messages"),
        (
            [{"prompt": "a", "by": "b"}, {"prompt": "a", "by": "b" * 1025}],
            *({"by": "by"}, "row 2 of .*: column 'by' has a label of more than 1,024 characters"),
        ),
        (
            [{"prompt": "a"}],
            *({"chat_template_kwargs": {"thinking": True}}, "is for conversations, but column 'prompt' of"),
        ),
    ],
)
def test_files_whose_prompts_no_server_takes_are_refused(tmp_path, rows, options, message):
    with pytest.raises(CorpusError, match=message):
        prompts_of(tmp_path, rows, **options)
