"""Files in, files out: the same rows with their figures, in order, and no file that is half done."""

import json
import math
import shlex

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_server import FakeServer, clients_of, nlls

from scoremode import CorpusError, OutputError, TransportError, score_corpus
from scoremode.corpus import documents, output_file, pipeline
from tests.doc_examples import examples

FIGURES = ["num_tokens", "nll", "perplexity", "bits_per_byte"]
# Most fit the context of 63 tokens; one of them is a little longer, and one much.
TEXTS = [f"document {index}, é" + "x" * {40: 80, 50: 300}.get(index, 37 * index % 45) for index in range(60)]
NLLS = [sum(nlls(text)) for text in TEXTS]


@pytest.fixture(autouse=True)
def small_requests(monkeypatch):
    """A few documents are several requests."""
    monkeypatch.setattr(documents, "_REQUEST_BYTES", 300)


async def run(inputs, output, *servers, **settings):
    return await score_corpus(clients_of(servers or [FakeServer()]), inputs, output, **{"concurrency": 4, **settings})


async def interrupted(inputs, output, allowed=20, **settings):
    """A run whose server is lost after this number of texts."""
    with pytest.raises(TransportError):
        await run(inputs, output, FakeServer(allowed=allowed), concurrency=1, **settings)


def write_parquet(path, texts=TEXTS, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts, **columns}), path)
    return path


def column(path, name="nll"):
    return pq.read_table(path).column(name).to_pylist()


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def parquet(tmp_path):
    return write_parquet(tmp_path / "in" / "rows.parquet", row=range(len(TEXTS)))


async def test_each_row_has_its_figures_and_the_order_is_kept(parquet, output, monkeypatch):
    monkeypatch.setattr(output_file, "_ROW_GROUP_ROWS", 20)
    done = await run([parquet], output, per_token=True, figures=["min_k++", "min_k", "entropy", "min_k"])
    table = pq.read_table(output / "rows.parquet")
    more = ["entropy", "min_k", "min_k_plus_plus", "token_ids", "token_logprobs"]
    assert table.column_names == ["text", "row", *FIGURES, *more]
    assert table.column("text").to_pylist() == TEXTS
    for row, nll in zip(table.to_pylist(), NLLS, strict=True):
        tokens = list(row["text"].encode())
        assert (row["num_tokens"], row["nll"]) == (len(tokens), nll)
        assert row["perplexity"] == pytest.approx(math.exp(nll / len(tokens)), rel=1e-12)
        assert row["bits_per_byte"] == pytest.approx(nll / math.log(2) / len(tokens), rel=1e-12)
        assert row["token_ids"] == tokens
        assert [-logprob for logprob in row["token_logprobs"]] == nlls(row["text"])
    assert (done.num_documents, done.num_tokens) == (60, sum(len(text.encode()) for text in TEXTS))
    assert pq.ParquetFile(output / "rows.parquet").metadata.num_row_groups > 1


async def test_documents_without_text_have_no_figures_and_are_counted(tmp_path, output):
    write_parquet(tmp_path / "in" / "a.parquet", ["good", None, "", "fine"])
    write_parquet(tmp_path / "in" / "b.parquet", pa.array([b"good", b"\xff\xfe", None, b"fine"]).view(pa.string()))
    done = await run([tmp_path / "in"], output)
    expected = [sum(nlls("good")), None, None, sum(nlls("fine"))]
    assert [column(output / f"{name}.parquet") for name in "ab"] == [expected, expected]
    assert (done.num_unscored, done.first_error) == (4, "the text is null")


async def test_other_columns_keep_their_types(tmp_path, output):
    table = pa.table(
        {
            "nested": pa.array([{"a": [1, None], "b": {"c": "x"}}, None]),
            "kind": pa.array(["a", None]).dictionary_encode(),
            "text": pa.array(["one", "two"], pa.large_string()),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    await run([tmp_path / "rows.parquet"], output)
    assert pq.read_table(output / "rows.parquet").select(table.column_names).equals(table)


async def test_an_empty_object_is_null_in_parquet(tmp_path, output):
    rows = [{"text": "a", "meta": {}, "all": [{"of": {}}]}, {"text": "b", "meta": {}, "all": [{"of": {"n": 1}}]}, {}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = await run([tmp_path / "rows.jsonl"], output)
    assert column(output / "rows.parquet", "meta") == [None] * 3
    assert column(output / "rows.parquet", "all") == [[{"of": None}], [{"of": {"n": 1}}], None]
    assert done.num_tokens == 2


async def test_a_folder_is_read_at_any_depth_and_files_may_be_empty(tmp_path, output):
    for name in ("b.parquet", "en/a.parquet", "_hidden/c.parquet", ".d.parquet"):
        write_parquet(tmp_path / "in" / name)
    write_parquet(tmp_path / "in" / "none.parquet", pa.array([], pa.string()))
    for name in ("empty.jsonl", "README.md"):
        (tmp_path / "in" / name).write_text("")
    done = await run([tmp_path / "in"], output)
    assert (done.files_done, done.num_documents) == (4, 120)
    assert sorted(contents(output)) == ["b.parquet", "empty.parquet", "en/a.parquet", "none.parquet"]
    assert pq.read_table(output / "empty.parquet").num_rows == 0
    assert pq.read_table(output / "none.parquet").column_names == ["text", *FIGURES]


async def test_figures_of_two_models_are_in_one_file(output, tmp_path, parquet):
    await run([parquet], output, column_prefix="a_")
    await run([output / "rows.parquet"], tmp_path / "both", column_prefix="b_", figures=["fast_detect"])
    written = pq.read_table(tmp_path / "both" / "rows.parquet")
    names = [prefix + name for prefix in ("a_", "b_") for name in FIGURES]
    assert written.column_names[-9:] == [*names, "b_fast_detect"]
    assert written.column("a_nll").to_pylist() == written.column("b_nll").to_pylist() == NLLS
    assert {b"scoremode.a_", b"scoremode.b_"} <= set(written.schema.metadata)


async def test_duckdb_filters_the_rows_by_the_example(tmp_path, monkeypatch):
    """The fake server's rule gives letters these nats: 0.25 for "i", 0.375 for "s", 0.75 for "t" and 0.875 for "a": the
    first three have less than 1.2 bits, "a" 1.26."""
    monkeypatch.chdir(tmp_path)
    write_parquet(tmp_path / "in" / "en" / "a.parquet", ["i", None, "a", "", "s"], row=range(5))
    write_parquet(tmp_path / "in" / "b.parquet", [None, "t"], row=[5, None])
    await run([tmp_path / "in"], "scored")
    [(_, code)] = examples("duckdb -c").values()
    duckdb.sql(shlex.split(code)[-1])
    kept = pq.read_table("kept.parquet")
    assert kept.column_names == ["text", "row", *FIGURES]
    assert list(zip(*(kept.column(name).to_pylist() for name in ("text", "row", "nll")), strict=True)) == [
        ("t", None, 0.75),
        ("i", 0, 0.25),
        ("s", 4, 0.375),
    ]


async def test_the_servers_that_are_left_score_the_documents_of_one_that_fails(parquet, output):
    await run([parquet], output, FakeServer(allowed=5), FakeServer())
    assert column(output / "rows.parquet") == NLLS


async def test_a_resumed_run_has_the_same_result(tmp_path, output, parquet):
    inputs = [write_parquet(tmp_path / "in" / "first.parquet", TEXTS[:10]), parquet]
    settings = {"per_token": True, "figures": ["entropy", "min_k", "min_k++", "fast_detect"]}
    await run(inputs, tmp_path / "whole", **settings)
    await interrupted(inputs, output, **settings)
    written = (output / "first.parquet").stat().st_mtime_ns
    again = FakeServer()
    done = await run(inputs, output, again, **settings, resume=True)
    assert (output / "first.parquet").stat().st_mtime_ns == written
    for name in ("first.parquet", "rows.parquet"):
        assert pq.read_table(output / name).equals(pq.read_table(tmp_path / "whole" / name))
    assert sorted(contents(output)) == ["first.parquet", "rows.parquet"]
    # Answers of the first run are not requested again. The longest document is tokenized instead.
    asked = {text for body in again.score_requests for text in body.get("continuations", ())}
    assert asked == {*TEXTS[done.num_resumed :]} - {TEXTS[50]}
    assert done.num_resumed > 0


async def test_a_journal_with_a_torn_end_is_resumed_before_it(parquet, output, tmp_path):
    await run([parquet], tmp_path / "whole")
    await interrupted([parquet], output, 40)
    journal = output / ".rows.parquet.journal"
    whole = journal.read_bytes()
    for size in (len(whole) - 1, len(whole) - 100, 700, 100, 1):
        journal.write_bytes(whole[:size])
        await interrupted([parquet], output, 9, resume=True)
    await run([parquet], output, resume=True)
    assert pq.read_table(output / "rows.parquet").equals(pq.read_table(tmp_path / "whole" / "rows.parquet"))


@pytest.mark.parametrize("finished", [True, False])
async def test_files_of_other_runs_are_neither_resumed_nor_overwritten(parquet, output, finished):
    await (run([parquet], output) if finished else interrupted([parquet], output))
    before = contents(output)
    for fingerprint, settings, message in (
        ("fingerprint of bytes", {"resume": True, "per_token": True}, "per_token is False instead of True"),
        ("fingerprint of bytes", {"resume": True, "figures": ["min_k"]}, r"figures is None instead of \['min_k'\]"),
        ("other", {"resume": True}, r"server\.fingerprint is 'fingerprint of bytes' instead of 'other'"),
        ("fingerprint of bytes", {}, "--resume"),
    ):
        with pytest.raises(OutputError, match=message):
            await run([parquet], output, FakeServer(info={"fingerprint": fingerprint}), **settings)
    assert contents(output) == before
    if finished:
        return
    write_parquet(parquet, list(reversed(TEXTS)), row=range(len(TEXTS)))
    with pytest.raises(OutputError, match="input_sha256 is"):
        await run([parquet], output, resume=True)


async def test_the_reader_waits_for_the_writer(tmp_path, output, monkeypatch):
    """While the first answer is outstanding, 5,000 bytes are read here."""
    monkeypatch.setattr(pipeline, "_PIECES_PER_REQUEST", 1000)
    monkeypatch.setattr(pipeline, "_HELD_BYTES", 5000)
    texts = [f"document {index}, none of them long" for index in range(500)]
    server, seen_meanwhile = FakeServer(), []

    async def slow(request):
        if request.method == "POST" and not server.score_requests and not seen_meanwhile:
            seen_meanwhile.append(0)
            # All others are answered at once.
            for _ in range(300):
                await pipeline.in_thread(int)
            seen_meanwhile.append(len(server.score_requests))
        return server(request)

    await run([write_parquet(tmp_path / "long.parquet", texts)], output, slow, concurrency=2)
    assert seen_meanwhile[1] <= 2 * 4 + 1 < 40 < len(server.score_requests)
    assert column(output / "long.parquet", "text") == texts


@pytest.mark.parametrize(
    ("inputs", "folder", "settings", "complaint"),
    [
        ("a b", "out", {}, "would both become rows.parquet"),
        ("rows.csv", "out", {}, "its name should end in one of"),
        ("missing.parquet", "out", {}, "no such file or folder"),
        ("broken.parquet", "out", {}, "cannot read .*broken.parquet"),
        ("a/rows.parquet", "a", {}, "which is read"),
        ("a", "out", {"figures": ["kld"]}, "'kld' is not one of entropy, min_k, min_k"),
        ("a", "out", {"text_column": "body"}, "no column 'body' .* there are: text"),
        ("scored.parquet", "out", {}, r"has a column 'perplexity' already.*--column-prefix"),
    ],
)
async def test_unusable_inputs_are_refused_by_name(tmp_path, monkeypatch, inputs, folder, settings, complaint):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_parquet(tmp_path / name / "rows.parquet")
    write_parquet(tmp_path / "scored.parquet", perplexity=[1.0] * len(TEXTS))
    (tmp_path / "rows.csv").write_text("text\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no more")
    server = FakeServer()
    with pytest.raises(CorpusError, match=complaint):
        await run(inputs.split(), folder, server, **settings)
    assert server.score_requests == []


async def test_a_damaged_file_does_not_cost_the_one_before_it(parquet, output):
    whole, broken = parquet.read_bytes(), parquet.with_name("second.parquet")
    # The end, where the schema is, is whole; a page before it is not.
    broken.write_bytes(whole[:100] + b"?" * 600 + whole[700:])
    with pytest.raises(CorpusError, match=r"second\.parquet"):
        await run([parquet, broken], output)
    assert column(output / "rows.parquet") == NLLS
    broken.write_bytes(whole)
    done = await run([parquet, broken], output, resume=True)
    assert (done.files_done, done.num_finished_before) == (2, 1)
