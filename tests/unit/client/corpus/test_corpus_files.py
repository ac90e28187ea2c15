"""Files in, files out: the same rows with their figures, in order, and no file that is half done."""

import gzip
import json
import math
from datetime import UTC, datetime

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from document_server import DocumentServer, nlls
from fake_scoremode import INFO, answer

from scoremode import (
    AsyncScoreClient,
    CorpusError,
    OutputError,
    ScoremodeError,
    ServersDifferError,
    TransportError,
    score_corpus,
)
from scoremode.corpus import documents, output_file, pipeline

FIGURES = ["num_tokens", "nll", "perplexity", "bits_per_byte"]
# Most fit the context of 63 tokens; one of them is a little longer, and one much.
TEXTS = [f"document {index}, " + "x" * {40: 80, 50: 300}.get(index, 37 * index % 45) for index in range(60)]


@pytest.fixture(autouse=True)
def small_requests(monkeypatch):
    """So that a few documents are several requests."""
    monkeypatch.setattr(documents, "_REQUEST_BYTES", 300)


class Server:
    """Answers as `DocumentServer`, for so many requests for scores; then the connection is refused."""

    def __init__(self, allowed=10**9, info=None):
        self.documents = DocumentServer()
        self.allowed = allowed
        self._info = info or {}

    async def __call__(self, request):
        if request.url.path == "/v1/score" and request.method == "GET":
            return httpx.Response(200, json={**INFO, **self._info})
        if request.url.path == "/v1/score":
            self.allowed -= 1
        if self.allowed < 0:
            raise httpx.ConnectError("refused")
        return self.documents(request)


async def run(inputs, output, *servers, **settings):
    clients = [
        AsyncScoreClient(f"http://{index}", transport=httpx.MockTransport(server), max_retries=0)
        for index, server in enumerate(servers or [Server()])
    ]
    try:
        return await score_corpus(clients, inputs, output, **{"concurrency": 4, **settings})
    finally:
        for client in clients:
            await client.close()


def write_parquet(path, texts=TEXTS, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts, **columns}), path)
    return path


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def parquet(tmp_path):
    return write_parquet(tmp_path / "in" / "rows.parquet", row=range(len(TEXTS)))


async def test_each_row_has_its_figures_and_the_order_is_kept(parquet, output):
    done = await run([parquet], output)
    table = pq.read_table(output / "rows.parquet")
    assert table.column_names == ["text", "row", *FIGURES]
    assert table.column("text").to_pylist() == TEXTS
    for row in table.to_pylist():
        nll = sum(nlls(row["text"]))
        assert row["num_tokens"] == len(row["text"])
        assert row["nll"] == nll
        assert row["perplexity"] == pytest.approx(math.exp(nll / len(row["text"])), rel=1e-12)
        assert row["bits_per_byte"] == pytest.approx(nll / math.log(2) / len(row["text"]), rel=1e-12)
    assert (done.num_documents, done.num_kept, done.num_unscored) == (60, 60, 0)
    assert done.num_tokens == sum(map(len, TEXTS))
    assert [*contents(output)] == ["rows.parquet"]


async def test_row_groups_end_at_a_number_of_rows(parquet, output, monkeypatch):
    monkeypatch.setattr(output_file, "_ROW_GROUP_ROWS", 20)
    await run([parquet], output)
    written = pq.ParquetFile(output / "rows.parquet").metadata
    sizes = [written.row_group(index).num_rows for index in range(written.num_row_groups)]
    assert sum(sizes) == len(TEXTS)
    # The rows of a request stay together.
    assert len(sizes) > 1
    assert min(sizes[:-1]) >= 20
    assert max(sizes) < 40


async def test_every_tokens_values_on_request(parquet, output):
    await run([parquet], output, per_token=True)
    for row in pq.read_table(output / "rows.parquet").to_pylist():
        assert row["token_ids"] == list(row["text"].encode())
        assert [-logprob for logprob in row["token_logprobs"]] == nlls(row["text"])


async def test_documents_without_text_have_no_figures_and_are_told_of(tmp_path, output):
    texts = ["good", None, "", "fine"]
    broken = pa.array([b"good", b"\xff\xfe", None, b"fine"]).view(pa.string())
    for name, column in (("nulls", texts), ("broken", broken)):
        pq.write_table(pa.table({"text": column}), tmp_path / f"{name}.parquet")
    done = await run([tmp_path / "nulls.parquet", tmp_path / "broken.parquet"], output)
    for name in ("nulls", "broken"):
        figures = pq.read_table(output / f"{name}.parquet", columns=FIGURES).to_pylist()
        assert [row["nll"] for row in figures] == [sum(nlls("good")), None, None, sum(nlls("fine"))]
        assert figures[1] == dict.fromkeys(FIGURES)
    assert done.num_unscored == 4
    assert done.first_error == "there is no text"


async def test_other_columns_of_parquet_survive_with_their_types_and_metadata(tmp_path, output):
    table = pa.table(
        {
            "when": pa.array([datetime(2024, 1, 1, tzinfo=UTC), None], pa.timestamp("us", "Europe/Berlin")),
            "nested": pa.array([{"a": [1, None], "b": {"c": "x"}}, None]),
            "kind": pa.array(["a", None]).dictionary_encode(),
            "text": pa.array(["one", "two"], pa.large_string()),
            "raw": pa.array([b"\xff", None]),
            "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
        }
    ).replace_schema_metadata({"pandas": "whatever"})
    pq.write_table(table, tmp_path / "rows.parquet")
    await run([tmp_path / "rows.parquet"], output)
    written = pq.read_table(output / "rows.parquet")
    assert written.select(table.column_names).equals(table)
    assert written.schema.metadata[b"pandas"] == b"whatever"


async def test_categories_are_texts_too(tmp_path, output):
    pq.write_table(pa.table({"text": pa.array(["one", "two", "one"]).dictionary_encode()}), tmp_path / "rows.parquet")
    await run([tmp_path / "rows.parquet"], output)
    expected = [sum(nlls(text)) for text in ("one", "two", "one")]
    assert pq.read_table(output / "rows.parquet").column("nll").to_pylist() == expected


async def test_json_lines_become_parquet(tmp_path, output):
    rows = [{"text": text, "id": index, "tags": ["a"] * (index % 3)} for index, text in enumerate(TEXTS)]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(content))
    await run([tmp_path / "rows.jsonl.gz"], output)
    written = pq.read_table(output / "rows.parquet")
    assert written.select(["text", "id", "tags"]).to_pylist() == rows
    assert written.column("nll").to_pylist() == [sum(nlls(text)) for text in TEXTS]


async def test_a_file_without_a_row_becomes_a_file_without_a_row(tmp_path, output):
    (tmp_path / "empty.jsonl").write_text("")
    write_parquet(tmp_path / "none.parquet", pa.array([], pa.string()))
    await run([tmp_path / "empty.jsonl", tmp_path / "none.parquet"], output, filter="nll < 3")
    assert pq.read_table(output / "empty.parquet").num_rows == 0
    assert pq.read_table(output / "none.parquet").column_names == ["text", *FIGURES]


async def test_a_folder_is_read_at_any_depth_and_keeps_its_layout(tmp_path, output):
    for name in ("b.parquet", "en/a.parquet", "_hidden/c.parquet", ".d.parquet"):
        write_parquet(tmp_path / "in" / name)
    (tmp_path / "in" / "README.md").write_text("not read")
    done = await run([tmp_path / "in"], output)
    assert sorted(contents(output)) == ["b.parquet", "en/a.parquet"]
    assert done.files_done == 2


async def test_a_filter_drops_rows_and_those_without_figures(tmp_path, output):
    path = write_parquet(tmp_path / "rows.parquet", [*TEXTS, None], language=["en", "de"] * 30 + ["en"])
    condition = "nll < 100 and language == 'en'"
    done = await run([path], output, filter=condition)
    expected = [text for text in TEXTS[::2] if sum(nlls(text)) < 100]
    assert 0 < len(expected) < 30
    assert pq.read_table(output / "rows.parquet").column("text").to_pylist() == expected
    assert (done.num_documents, done.num_kept) == (61, len(expected))


async def test_two_models_beside_each_other(parquet, output, tmp_path):
    await run([parquet], output, column_prefix="a_")
    await run([output / "rows.parquet"], tmp_path / "both", column_prefix="b_", filter="a_nll - b_nll == 0")
    written = pq.read_table(tmp_path / "both" / "rows.parquet")
    assert written.column_names[-8:] == [prefix + name for prefix in ("a_", "b_") for name in FIGURES]
    assert written.num_rows == 60
    assert {b"scoremode.a_", b"scoremode.b_"} <= set(written.schema.metadata)


@pytest.mark.parametrize("allowed", [0, 1, 5, 12])
async def test_a_run_that_ended_half_way_goes_on_with_the_same_result(tmp_path, output, parquet, allowed):
    first = write_parquet(tmp_path / "in" / "first.parquet", TEXTS[:10])
    inputs = [first, parquet]
    await run(inputs, tmp_path / "whole", per_token=True)
    with pytest.raises(TransportError):
        await run(inputs, output, Server(allowed), per_token=True, concurrency=1)
    left = {name: content for name, content in contents(output).items() if not name.startswith(".")}
    assert left.keys() <= {"first.parquet"}
    stamps = {name: (output / name).stat().st_mtime_ns for name in left}
    again = Server()
    done = await run(inputs, output, again, per_token=True, resume=True)
    assert {name: (output / name).read_bytes() for name in left} == left
    assert {name: (output / name).stat().st_mtime_ns for name in left} == stamps
    for name in ("first.parquet", "rows.parquet"):
        assert pq.read_table(output / name).equals(pq.read_table(tmp_path / "whole" / name))
    assert sorted(contents(output)) == ["first.parquet", "rows.parquet"]
    # What was answered in the first run is not asked for again. The longest document is tokenized instead.
    missing = [*([] if left else TEXTS[:10]), *TEXTS][done.num_resumed :]
    asked = {text for body in again.documents.score_requests for text in body.get("continuations", ())}
    assert asked == {*missing} - {TEXTS[50]}
    assert bool(left) == (allowed >= 5)
    assert (done.num_resumed > 0) == (allowed > 0)


async def test_a_journal_with_a_torn_end_goes_on_before_it(parquet, output, tmp_path):
    await run([parquet], tmp_path / "whole")
    with pytest.raises(TransportError):
        await run([parquet], output, Server(5), concurrency=1)
    journal = output / ".rows.parquet.journal"
    whole = journal.read_bytes()
    for size in (len(whole) - 1, len(whole) - 100, 700, 100, 1):
        journal.write_bytes(whole[:size])
        with pytest.raises(TransportError):
            await run([parquet], output, Server(1), concurrency=1, resume=True)
    await run([parquet], output, resume=True)
    assert pq.read_table(output / "rows.parquet").equals(pq.read_table(tmp_path / "whole" / "rows.parquet"))


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("settings", "info", "named"),
    [
        ({"per_token": True}, {}, "per_token is False instead of True"),
        ({"filter": "nll < 2"}, {}, "filter is None instead of 'nll < 2'"),
        ({"context_length": 32}, {}, "context_length is 63 instead of 32"),
        ({}, {"dtype": "bfloat16"}, "server.dtype is 'float32' instead of 'bfloat16'"),
        ({}, {"fingerprint": "other"}, "server.fingerprint is None instead of 'other'"),
    ],
    ids=["per token", "filter", "context", "dtype", "weights"],
)
async def test_other_settings_or_another_model_are_refused_by_name(parquet, output, settings, info, named, finished):
    if finished:
        await run([parquet], output)
    else:
        with pytest.raises(TransportError):
            await run([parquet], output, Server(2), concurrency=1)
    before = contents(output)
    with pytest.raises(OutputError, match=named):
        await run([parquet], output, Server(info=info), resume=True, **settings)
    assert contents(output) == before


async def test_another_input_of_the_same_name_is_refused(parquet, output):
    with pytest.raises(TransportError):
        await run([parquet], output, Server(2), concurrency=1)
    write_parquet(parquet, list(reversed(TEXTS)), row=range(len(TEXTS)))
    with pytest.raises(OutputError, match="input_sha256 is"):
        await run([parquet], output, resume=True)


async def test_what_is_there_is_not_overwritten(parquet, output):
    await run([parquet], output)
    with pytest.raises(OutputError, match="go on by --resume"):
        await run([parquet], output)


async def test_a_file_that_is_not_ours_is_not_taken_for_finished(parquet, output):
    write_parquet(output / "rows.parquet")
    with pytest.raises(OutputError, match="not of ppl-client corpus"):
        await run([parquet], output, resume=True)


async def test_a_server_that_dies_is_dropped_and_the_other_takes_over(parquet, output):
    dying, other = Server(4), Server()
    await run([parquet], output, dying, other)
    assert pq.read_table(output / "rows.parquet").column("nll").to_pylist() == [sum(nlls(text)) for text in TEXTS]
    assert len(dying.documents.score_requests) == 4
    assert other.documents.score_requests


async def test_servers_of_different_models_are_refused(parquet, output):
    with pytest.raises(ServersDifferError):
        await run([parquet], output, Server(), Server(info={"dtype": "bfloat16"}))


@pytest.mark.parametrize(("pieces", "num_bytes"), [(4, 1 << 30), (1000, 5000)], ids=["pieces", "bytes"])
async def test_the_reader_waits_while_one_answer_keeps_the_rows_from_being_written(
    tmp_path, monkeypatch, pieces, num_bytes
):
    """What is between reader and writer is bounded: eight pieces here, or 5,000 bytes, of the hundreds of the file."""
    monkeypatch.setattr(pipeline, "_PIECES_PER_PLACE", pieces)
    monkeypatch.setattr(pipeline, "_HELD_BYTES", num_bytes)
    texts = [f"document {index}, none of them long" for index in range(3000)]
    path = write_parquet(tmp_path / "long.parquet", texts)
    server, held, seen = Server(), [], []

    async def slow(request):
        if request.method == "POST":
            seen.append(request)
            if len(seen) == 1:
                held.append(True)
                # All others are answered at once: the one that has to wait is the first of the file.
                for _ in range(2000):
                    await pipeline.in_thread(int)
                    if len(seen) > 100:
                        break
                held.append(len(seen))
        return await server(request)

    await run([path], tmp_path / "out", slow, concurrency=2)
    assert held[1] <= 2 * 4 + 2
    assert len(seen) > 200
    assert pq.read_table(tmp_path / "out" / "long.parquet").column("text").to_pylist() == texts


@pytest.mark.parametrize(
    ("texts", "settings", "complaint"),
    [
        (TEXTS, {"text_column": "body"}, "no column 'body' .* there are: text"),
        (range(60), {}, "column 'text' of .* is int64, not text"),
        (TEXTS, {"filter": "missing < 2"}, "--filter does not fit"),
        (TEXTS, {"filter": "nll <"}, "--filter 'nll <' is no condition"),
    ],
    ids=["no column", "no text", "filter on nothing", "no filter"],
)
async def test_what_cannot_be_scored_is_said_before_anything_is(tmp_path, output, texts, settings, complaint):
    path = write_parquet(tmp_path / "rows.parquet", texts)
    server = Server()
    with pytest.raises(CorpusError, match=complaint):
        await run([path], output, server, **settings)
    assert server.documents.score_requests == []


async def test_a_column_of_an_added_name_is_not_overwritten(tmp_path, output):
    path = write_parquet(tmp_path / "rows.parquet", perplexity=[1.0] * 60)
    with pytest.raises(CorpusError, match=r"has a column 'perplexity' already.*--column-prefix"):
        await run([path], output)


async def test_inputs_that_cannot_be_read_or_told_apart(tmp_path, output):
    write_parquet(tmp_path / "a" / "rows.parquet")
    write_parquet(tmp_path / "b" / "rows.parquet")
    (tmp_path / "rows.csv").write_text("text\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no more")
    (tmp_path / "none").mkdir()
    for inputs, complaint in (
        (["a", "b"], "would both become rows.parquet"),
        (["rows.csv"], "its name should end in one of"),
        (["missing.parquet"], "no such file or folder"),
        (["none"], "no file in .* ends in one of"),
        (["broken.parquet"], "cannot read .*broken.parquet"),
    ):
        with pytest.raises(CorpusError, match=complaint):
            await run([tmp_path / name for name in inputs], output)
    with pytest.raises(CorpusError, match="which is read"):
        await run([tmp_path / "a"], tmp_path / "a" / "out")
    with pytest.raises(CorpusError, match="which is read"):
        await run([tmp_path / "a" / "rows.parquet"], tmp_path / "a")


async def test_a_file_that_cannot_be_read_does_not_cost_the_one_before_it(parquet, output, tmp_path):
    whole = parquet.read_bytes()
    broken = tmp_path / "in" / "second.parquet"
    # The end, where the schema is, is whole; a page before it is not.
    broken.write_bytes(whole[:100] + b"?" * 600 + whole[700:])
    with pytest.raises(CorpusError, match=r"second\.parquet"):
        await run([parquet, broken], output)
    assert pq.read_table(output / "rows.parquet").num_rows == 60
    parquet.with_name("second.parquet").write_bytes(whole)
    done = await run([parquet, broken], output, resume=True)
    assert (done.files_done, done.num_finished_before) == (2, 1)


async def test_without_pyarrow_it_is_said_what_to_install(parquet, output, monkeypatch):
    import sys

    for name in [name for name in sys.modules if name.startswith("scoremode.corpus.pipeline")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ScoremodeError, match=r'pip install "scoremode\[corpora\]"'):
        await run([parquet], output, answer)
