"""Runs, chunks, row blocks and budgets: exact bytes, no needless copies."""

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrt.errors import LocalProtocolError, OverBudget, TransferError
from flowrt.protocol.messages import ITEM_BYTES, Column, Part
from flowrt.transport.lanes.channel import MAX_CHUNK_BYTES, STAGE_BYTES, ColumnRun, split_run
from flowrt.transport.tensor_store import Packed, TensorStore

COLUMNS = [Column(dtype, dtype, "slot") for dtype in ITEM_BYTES]


def rows_of(dtype: str, lengths: list[int]) -> list[torch.Tensor]:
    rows = []
    for length in lengths:
        row = torch.randint(0, 255, (length * ITEM_BYTES[dtype],), dtype=torch.uint8)
        rows.append((row % 2).bool() if dtype == "bool" else row.view(getattr(torch, dtype)))
    return rows


def bytes_of(run: ColumnRun, stage_bytes: int) -> bytes:
    out = torch.zeros(sum(run.sizes), dtype=torch.uint8)
    for piece in split_run(run.sizes, stage_bytes):
        run.copy(piece, out[piece.start : piece.start + piece.size])
    return out.numpy().tobytes()


@given(st.lists(st.integers(0, 60), max_size=12), st.integers(1, 64))
def test_chunks_cover_a_run_once_and_in_order(sizes: list[int], stage_bytes: int) -> None:
    start = 0
    for piece in split_run(sizes, stage_bytes):
        assert piece.start == start
        assert 0 < piece.size < 2 * stage_bytes or piece.last - piece.first == 1
        assert piece.last - piece.first == 1 or piece.size == sum(sizes[piece.first : piece.last])
        start += piece.size
    assert start == sum(sizes)


def test_large_row_is_split_into_chunks() -> None:
    sizes = [5, MAX_CHUNK_BYTES + 7, 3]
    assert [(piece.first, piece.size) for piece in split_run(sizes, STAGE_BYTES)] == [
        (0, 5),
        (1, MAX_CHUNK_BYTES),
        (1, 7),
        (2, 3),
    ]


@given(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(8, 64))
def test_sent_rows_equal_stored_rows(dtype: str, lengths: list[int], stage_bytes: int) -> None:
    rows = rows_of(dtype, lengths)
    flat = torch.cat([row.view(torch.uint8) for row in rows])
    exact = flat.numpy().tobytes()
    ids = tuple(range(len(rows)))
    for given_rows in (rows, Packed(flat.view(getattr(torch, dtype)), lengths)):
        store = TensorStore(COLUMNS)
        store.put_rows(dtype, ids, given_rows)
        (run,) = store.runs([Part(dtype, ids, tuple(lengths))])
        assert bytes_of(run, stage_bytes) == exact
        for item in ids:
            assert store.get(dtype, item).view(torch.uint8).tolist() == rows[item].view(torch.uint8).tolist()


def test_unannounced_length_raises() -> None:
    store = TensorStore(COLUMNS)
    store.put("int32", 1, torch.arange(3, dtype=torch.int32))
    with pytest.raises(TransferError, match="3 elements where 4 were announced"):
        store.runs([Part("int32", (1,), (4,))])


def test_packed_rows_with_wrong_lengths_raise() -> None:
    with pytest.raises(LocalProtocolError, match="5 elements are packed into 4"):
        TensorStore(COLUMNS).put_rows("int32", (1, 2), Packed(torch.zeros(4, dtype=torch.int32), (2, 3)))


def test_rows_of_a_batch_are_not_copied_and_freed_singly() -> None:
    store, batch = TensorStore(COLUMNS), torch.arange(80, dtype=torch.int32)
    store.put_rows("int32", range(8), list(batch.split(10)))
    assert store.get("int32", 3).data_ptr() == batch[30:].data_ptr()
    rows = store.rows("int32", (2, 3, 4))
    assert isinstance(rows, Packed)
    assert rows.values.tolist() == list(range(20, 50))
    store.free(("int32",), range(5), ())
    assert store.get("int32", 6).tolist() == list(range(60, 70))
    assert store.get("int32", 6).untyped_storage().nbytes() == 40
    assert store.statistics() == (3, 120)


def test_small_views_are_copied_and_graphs_detached() -> None:
    store = TensorStore([Column("x", "float32", "slot")])
    large, leaf = torch.zeros(100), torch.ones(3, requires_grad=True)
    for item, row in enumerate((large[:4], leaf * 2, torch.zeros(3, 2)[:, 0])):
        store.put("x", item, row)
        kept = store.get("x", item)
        assert not kept.requires_grad
        assert kept.is_contiguous()
        assert kept.untyped_storage().nbytes() == kept.nbytes
        assert torch.equal(kept, row)


async def test_rows_over_the_budget_are_neither_stored_nor_expected() -> None:
    store = TensorStore(COLUMNS, budget_bytes=100)
    store.put("uint8", 1, torch.zeros(60, dtype=torch.uint8))
    with pytest.raises(OverBudget, match=r"50 bytes for 1 rows of uint8 do not fit .* 60 are held and 0 are arriving"):
        store.put("uint8", 2, torch.zeros(50, dtype=torch.uint8))
    store.put("uint8", 1, torch.zeros(90, dtype=torch.uint8))  # in place of the 60
    store.free(("uint8",), (1,), ())
    parts = [Part("uint8", (3,), (80,))]
    arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    store.expect(parts, arrival)
    with pytest.raises(OverBudget, match="0 are held and 80 are arriving, of 100"):
        store.check_room({"uint8": [torch.zeros(21, dtype=torch.uint8)]})
    store.put_arrived(parts[0], torch.zeros(80, dtype=torch.uint8), arrival)
    store.arrival_done(arrival)
    assert store.statistics() == (1, 80)
    store.put("uint8", 4, torch.zeros(20, dtype=torch.uint8))
