"""Schedules as graphs, for any number of ranks: every visible pair once, messages that meet, no deadlock."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest
import torch

from flash_attention.call import Mask
from flash_attention.distributed import tiles
from flash_attention.distributed.heads import parts_of_heads
from flash_attention.distributed.layout import Layout
from flash_attention.distributed.schedule import METHODS, Heads, Message, Schedule, Step
from flash_attention.distributed.tiles import Tile

MASKS = (
    Mask(),
    Mask(None, 0),
    Mask(5, 0),
    Mask(3, 4),
    Mask(0, None),
    Mask(None, 2),
    Mask(0, 0),
    Mask(7, -2),
    Mask(-3, 9),
    Mask(-4, None),
    Mask(2, -3),
)
CAUSAL = Mask(None, 0)


def visible(layout: Layout, mask: Mask) -> torch.Tensor:
    """(total, total) bool, written independently: which key (column) each query (row) sees."""
    place = torch.arange(layout.total)
    distance = place[None, :] - place[:, None]
    seen = torch.ones(layout.total, layout.total, dtype=torch.bool)
    if mask.left is not None:
        seen &= distance >= -mask.left
    if mask.right is not None:
        seen &= distance <= mask.right
    if layout.documents is not None:
        of = torch.zeros(layout.total, dtype=torch.int64)
        for number, (first, last) in enumerate(zip(layout.documents, layout.documents[1:], strict=False)):
            of[first:last] = number
        seen &= of[:, None] == of[None, :]
    return seen


def pairs_of(tile: Tile) -> torch.Tensor:
    """(queries, keys) bool: the pairs of a tile."""
    distance = torch.arange(len(tile.k))[None, :] - torch.arange(len(tile.q))[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if tile.low is not None:
        seen &= distance >= tile.low
    if tile.high is not None:
        seen &= distance <= tile.high
    return seen


def index(rows: range) -> torch.Tensor:
    return torch.arange(rows.start, rows.stop, rows.step)


def computed(schedule: Schedule, backward: bool = False) -> torch.Tensor:
    """(query heads, total, total): how often each pair is computed, over all ranks."""
    layout = schedule.layout
    count = torch.zeros(schedule.heads.q, layout.total, layout.total, dtype=torch.int32)
    for rank in range(layout.world):
        own = layout.positions(rank)
        first = schedule.heads_of(rank)[0] if schedule.method == "ulysses" else 0
        group = schedule.heads.group
        received: set[tuple[int, int, int]] = set()  # owner, row, key head
        for step in schedule.backward(rank) if backward else schedule.forward(rank):
            if schedule.method == "ulysses":
                q_places = k_places = torch.arange(layout.total)
            else:
                of_block = range(*(step.heads_kv or (0, schedule.heads.kv)))
                for part in step.block:
                    needed = {(part.owner, row, head) for row in part.rows for head in of_block}
                    assert part.owner == rank or needed <= received
                places = [layout.positions(part.owner)[index(part.rows)] for part in step.block]
                k_places = torch.cat(places) if places else own[:0]
                q_places = own
            for tile in step.tiles:
                heads = tile.heads or (0, schedule.heads.q)
                heads = (heads[0] + first, heads[1] + first) if tile.heads else heads
                if schedule.method != "ulysses":  # the block has the key heads of these query heads
                    assert heads == (of_block.start * group, of_block.stop * group)
                where = (q_places[index(tile.q)][:, None], k_places[index(tile.k)][None, :])
                seen = pairs_of(tile)
                assert int(seen.sum()) == tile.pairs > 0
                count[heads[0] : heads[1], where[0], where[1]] += seen.int()
            # What a step brings is there in the next steps.
            received |= {
                (m.owner, row, head)
                for m in step.receives
                for rows in m.rows
                for row in rows
                for head in range(*(m.heads_kv or (0, schedule.heads.kv)))
            }
    return count


def check_meeting(programs: list[tuple[Step, ...]]) -> None:
    """Runs the programs with messages that wait for both sides, a step's messages together.

    A step ends when every message of it is in the current step of its other side as well: the strictest
    transport there is. All programs must reach their ends.
    """
    at = [0] * len(programs)
    while any(place < len(program) for place, program in zip(at, programs, strict=True)):
        current = [
            program[place] if place < len(program) else Step()
            for place, program in zip(at, programs, strict=True)
        ]
        moved = False
        for rank, program in enumerate(programs):
            if at[rank] == len(program):
                continue
            step = current[rank]
            ready = all(m in current[m.target].receives for m in step.sends)
            ready = ready and all(m in current[m.source].sends for m in step.receives)
            if ready and _partners_ready(rank, current):
                moved = True
                for partner in _linked(rank, current):
                    at[partner] += 1
                break
        assert moved, f"deadlock at steps {at}"


def _linked(rank: int, current: list[Step]) -> set[int]:
    """The ranks that must end their current steps together with this one."""
    found, new = {rank}, [rank]
    while new:
        step = current[new.pop()]
        for other in {m.target for m in step.sends} | {m.source for m in step.receives}:
            if other not in found:
                found.add(other)
                new.append(other)
    return found


def _partners_ready(rank: int, current: list[Step]) -> bool:
    return all(
        all(m in current[m.target].receives for m in current[other].sends)
        and all(m in current[m.source].sends for m in current[other].receives)
        for other in _linked(rank, current)
    )


def check(schedule: Schedule) -> None:
    layout, mask = schedule.layout, schedule.mask
    wanted = visible(layout, mask).int().expand(schedule.heads.q, -1, -1)
    assert torch.equal(computed(schedule), wanted)
    assert torch.equal(computed(schedule, backward=True), wanted)
    for programs in (
        [schedule.forward(rank) for rank in range(layout.world)],
        [schedule.backward(rank) for rank in range(layout.world)],
    ):
        check_meeting(programs)
        messages: list[Message] = [m for program in programs for step in program for m in step.sends]
        assert all(m.source != m.target and m.count for m in messages)
        assert len(messages) == sum(len(step.receives) for program in programs for step in program)
    if schedule.method == "ulysses":
        return
    seen = visible(layout, mask)
    for rank in range(layout.world):
        for step in schedule.forward(rank):
            for m in step.receives:
                # Rows at both ends of what is sent are seen, so that nothing is sent in vain.
                places = layout.positions(m.owner)
                for rows in m.rows:
                    for row in (rows[0], rows[-1]):
                        assert seen[layout.positions(rank)][:, places[row]].any()


def layouts(total: int, world: int) -> list[Layout]:
    half = (0, total // 3, total // 3, total)
    return [
        Layout.contiguous(total, world),
        Layout.zigzag(total, world),
        Layout.striped(total, world),
        Layout.striped(total, world, block=3),
        Layout.windowed(total, world, 6),
        Layout.zigzag(total, world, documents=half),
        Layout.striped(total, world, documents=half),
        Layout.per_document(half, world),
    ]


@pytest.mark.parametrize("world", range(1, 17))
@pytest.mark.parametrize("method", METHODS)
def test_every_visible_pair_is_computed_once(method: str, world: int) -> None:
    totals = (37,) if world > 4 else (37, 2, 0)
    heads = Heads(6, 2)
    for total in totals:
        for layout, mask in product(layouts(total, world), MASKS if world < 5 else MASKS[1:3]):
            check(Schedule(method, layout, mask, heads))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(40))
def test_random_layouts_and_masks(seed: int) -> None:
    dice = random.Random(seed)
    world, total = dice.randint(1, 16), dice.randint(0, 60)
    owners = [dice.randrange(world) for _ in range(total)]
    if seed % 2:  # runs, as users have them, with ranks that hold nothing
        owners = sorted(owners, key=lambda owner: owner * 7 % 5)
    positions = [[i for i in range(total) if owners[i] == rank] for rank in range(world)]
    if seed % 4 == 0:
        for of_rank in positions:
            dice.shuffle(of_rank)
    ends = sorted(dice.randint(0, total) for _ in range(dice.randint(0, 4)))
    layout = Layout.explicit(positions, documents=(0, *ends, total) if ends else None)
    mask = Mask(*(dice.choice([None, 0, 1, 4, 17]) for _ in range(2)))
    group, kv = dice.choice([1, 2, 4]), dice.randint(1, 5)
    for method in METHODS:
        check(Schedule(method, layout, mask, Heads(group * kv, kv)))


# ---------------------------------------------------------------------- what is sent and called
def test_a_zigzag_ring_computes_in_as_few_calls_as_can_be() -> None:
    schedule = Schedule("ring", Layout.zigzag(64, 4), CAUSAL, Heads(4, 4))
    for rank in range(4):
        steps = schedule.forward(rank)
        # The two parts of the last rank lie side by side, so that they are one.
        assert [len(step.tiles) for step in steps] == [2 if rank < 3 else 1, 1, 1, 1]
        assert {sum(tile.pairs for tile in step.tiles) for step in steps[1:]} == {128}  # all equally long


def calls(schedule: Schedule) -> list[list[int]]:
    """Tiles in each step of each rank."""
    return [[len(step.tiles) for step in schedule.forward(r)] for r in range(schedule.layout.world)]


def test_an_all_gather_computes_each_piece_of_queries_in_one_call_with_all_its_keys() -> None:
    """First, while keys travel, those that see keys of their own rank alone."""
    assert calls(Schedule("all_gather", Layout.zigzag(64, 4), CAUSAL, Heads(4, 4))) == [
        [1, 1], [0, 2], [0, 2], [0, 1],
    ]  # fmt: skip
    contiguous = Schedule("all_gather", Layout.contiguous(64, 4), Mask(20, 0), Heads(4, 4))
    assert calls(contiguous) == [[1, 0], [0, 1], [0, 1], [0, 1]]
    window = Schedule("all_gather", Layout.zigzag(64, 2), Mask(7, 0), Heads(4, 4))
    assert calls(window) == [[1, 1], [0, 1]]  # few rows see no other keys


def test_queries_in_one_tile_are_known() -> None:
    """Their results need no merging."""
    zigzag = Layout.zigzag(64, 4)
    assert all(Schedule("all_gather", zigzag, CAUSAL, Heads(4, 4)).coverage(r).once for r in range(4))
    assert not any(Schedule("ring", zigzag, CAUSAL, Heads(4, 4)).coverage(r).once for r in range(4))
    assert all(Schedule("ulysses", zigzag, CAUSAL, Heads(6, 3)).coverage(r).once for r in range(4))
    striped = Schedule("all_gather", Layout.striped(64, 4), CAUSAL, Heads(4, 4))
    assert not striped.coverage(0).once
    blind = Schedule("all_gather", Layout.contiguous(64, 4), Mask(None, -20), Heads(4, 4))
    assert blind.coverage(0) == (True, False)  # the first rows see nothing
    assert blind.coverage(3) == (True, True)
    assert tiles.coverage([Tile(range(4), range(2), heads=(0, 2))], 4, 2) == (True, True)
    assert tiles.coverage([Tile(range(4), range(2), heads=(0, 2))], 4, 3) == (True, False)
    halves = [Tile(range(4), range(2), heads=(0, 2)), Tile(range(4), range(2), heads=(2, 3))]
    assert tiles.coverage(halves, 4, 3) == (True, True)
    assert tiles.coverage([*halves, Tile(range(3, 4), range(2))], 4, 3) == (False, False)
    assert tiles.coverage([Tile(range(4), range(2)), Tile(range(4), range(2, 5))], 4, 3) == (False, False)


def test_a_piece_is_cut_where_much_of_it_can_be_computed_meanwhile() -> None:
    """But not where another piece can: each call has an end at which a GPU is not full."""
    schedule = Schedule("all_gather", Layout.zigzag(1 << 14, 2), Mask(1023, 0), Heads(4, 4))
    first, last = schedule.forward(0), schedule.forward(1)
    assert [[len(tile.q) for tile in step.tiles] for step in first] == [[4096], [4096]]
    assert [[len(tile.q) for tile in step.tiles] for step in last] == [[7168], [1024]]
    most = Schedule("all_gather", Layout.zigzag(1 << 14, 2), Mask(7000, 0), Heads(4, 4)).forward(1)
    assert [[len(tile.q) for tile in step.tiles] for step in most] == [[], [8192]]


def test_an_all_gather_of_much_work_sends_some_heads_first() -> None:
    heads, long = Heads(32, 8), Layout.zigzag(1 << 16, 2)
    two = ((0, 2), (2, 8))
    assert parts_of_heads(heads, 1 << 14, 1 << 16, False) == parts_of_heads(heads, 1, 1 << 16, True) == two
    assert parts_of_heads(heads, 1 << 12, 1 << 14, False) == two
    assert parts_of_heads(heads, 1 << 12, 1 << 14, True) == ((0, 4), (4, 8))
    assert parts_of_heads(heads, 1 << 10, 1 << 12, False) == (None,)
    assert parts_of_heads(Heads(32, 1), 1 << 14, 1 << 16, False) == (None,)

    def received(layout: Layout, mask: Mask) -> list[list[tuple[int, int] | None]]:
        """The heads of each step's keys, of the last rank."""
        steps = Schedule("all_gather", layout, mask, heads).forward(layout.world - 1)
        return [[m.heads_kv for m in step.receives] for step in steps]

    assert received(long, CAUSAL) == received(long, Mask()) == [[(0, 2)], [(2, 8)], []]
    assert received(long, Mask(4095, 0)) == [[None], []]  # all have queries that see own keys alone
    assert received(Layout.zigzag(1 << 20, 64), Mask(1 << 14, 0)) == [[(0, 2)] * 2, [(2, 8)] * 2, []]
    schedule = Schedule("all_gather", long, CAUSAL, heads)
    # Rank 0 has its first rows to compute until the first heads have come, rank 1 has nothing.
    assert calls(schedule) == [[1, 1, 1], [0, 1, 1]]
    assert [step.heads_kv for step in schedule.forward(1)] == [None, (0, 2), (2, 8)]
    back = [[m.heads_kv for m in step.sends if m.payload == "dkv"] for step in schedule.backward(0)]
    assert back == [[], [], [(0, 2)], [(2, 8)]]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_every_visible_pair_is_computed_once_where_heads_come_in_parts(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LEAST_BLOCKS", "LEAST_KEY_BLOCKS"):
        monkeypatch.setattr(f"flash_attention.distributed.heads.{name}", 0)
    for layout, mask in product(layouts(37, world), MASKS[:6]):
        check(Schedule("all_gather", layout, mask, Heads(10, 5)))
        check(Schedule("all_gather", layout, mask, Heads(2, 2)))


def test_without_a_mask_a_step_is_one_call_whatever_the_layout() -> None:
    for layout in layouts(64, 4)[:4]:
        steps = Schedule("ring", layout, Mask(), Heads(4, 4)).forward(1)
        if layout.name != "striped" or len(layout.ranks[0]) == 1:
            assert [len(step.tiles) for step in steps] == [1, 1, 1, 1]


def test_a_window_sends_what_it_sees_and_no_more() -> None:
    layout = Layout.contiguous(1 << 16, 8)
    schedule = Schedule("ring", layout, Mask(4095, 0), Heads(8, 8))
    sent = [sum(m.count for step in schedule.forward(rank) for m in step.sends) for rank in range(8)]
    assert sent == [4095] * 7 + [0]  # of 8192 rows of the one rank before, none of the others
    zigzag = Schedule("ring", Layout.zigzag(1 << 16, 8), Mask(4095, 0), Heads(8, 8))
    assert max(sum(m.count for s in zigzag.forward(r) for m in s.sends) for r in range(8)) <= 2 * 4095


def test_a_causal_mask_sends_nothing_backwards() -> None:
    schedule = Schedule("all_gather", Layout.contiguous(64, 4), CAUSAL, Heads(4, 4))
    for rank in range(4):
        assert {m.target for step in schedule.forward(rank) for m in step.sends} == set(range(rank + 1, 4))


def test_documents_of_one_rank_are_not_sent() -> None:
    layout = Layout.contiguous(64, 4, documents=(0, 16, 32, 48, 64))
    for rank in range(4):
        assert all(not step.sends and not step.receives for step in schedule_steps(layout, rank))


def schedule_steps(layout: Layout, rank: int) -> tuple[Step, ...]:
    return Schedule("ring", layout, CAUSAL, Heads(4, 4)).forward(rank)


@pytest.mark.parametrize(("q", "kv", "world"), [(32, 8, 8), (32, 8, 16), (32, 8, 3), (4, 4, 8), (6, 2, 4)])
def test_ulysses_gives_every_head_to_one_rank(q: int, kv: int, world: int) -> None:
    schedule = Schedule("ulysses", Layout.contiguous(64, world), CAUSAL, Heads(q, kv))
    ranges = [schedule.heads_of(rank) for rank in range(world)]
    assert (ranges[0][0], ranges[-1][1]) == (0, q)
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    sizes = [last - first for first, last in ranges]
    assert max(sizes) - min(sizes) <= (q // kv if kv % world == 0 else 1)
    if kv % world == 0:  # nothing is sent twice
        assert [schedule.heads_kv_of(rank) for rank in range(world)] == [
            (rank * kv // world, (rank + 1) * kv // world) for rank in range(world)
        ]


def test_a_layout_without_runs_is_refused_by_name() -> None:
    dice = random.Random(0)
    order = list(range(512))
    dice.shuffle(order)
    layout = Layout.explicit([order[:256], order[256:]])
    with pytest.raises(NotImplementedError, match=r"^this layout splits the work of one rank into more than"):
        Schedule("ring", layout, CAUSAL, Heads(1, 1)).forward(0)
