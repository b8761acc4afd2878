"""What cannot be recorded is refused with the user's line and a way out, before anything is computed."""

from __future__ import annotations

import functools
import math
import re

import numpy as np
import pytest
import torch

from flash_attention import attention
from flash_attention.errors import ModError
from flash_attention.mods import and_masks, or_masks, trace
from flash_helpers.mods.derivative import derivative
from flash_helpers.mods.mod import MAX_NODES

TABLE = torch.randn(8)
MATRIX = torch.randn(4, 8)


def branch(s, b, h, q, k):
    if q > k:  # the branch
        return s
    return s * 2


def both(s, b, h, q, k):
    return torch.where(q > k and k > 2, s, 0.0)  # and


def smallest(s, b, h, q, k):
    return s + min(q, k)  # min


def looped(s, b, h, q, k):
    for i in range(q):  # range
        s = s + i
    return s


def mathematical(s, b, h, q, k):
    return s * math.exp(h)  # math


def itemised(s, b, h, q, k):
    return s + TABLE[q.item()]  # item


def strange(s, b, h, q, k):
    return torch.special.bessel_j0(s)  # bessel


def method(s, b, h, q, k):
    return s.cumsum(0)  # method


def drawn(s, b, h, q, k):
    return s + torch.rand(())  # rand


def drawn_table(s, b, h, q, k):
    return s + torch.empty(8).normal_()[h]  # normal


def dropped(s, b, h, q, k):
    return s + torch.nn.functional.dropout(TABLE)[h]  # dropout


def whole_table(s, b, h, q, k):
    return s + MATRIX  # table


def open_row(s, b, h, q, k):
    return s + MATRIX[h, :] + MATRIX  # row and table


def real_index(s, b, h, q, k):
    return s + TABLE[q / 2]  # index


def sliced(s, b, h, q, k):
    return s + MATRIX[h, 1:].sum(-1)  # slice


def sliced_by_values(s, b, h, q, k):
    return s + MATRIX[h, k : k + 2].sum(-1)  # slice


def many_indices(s, b, h, q, k):
    return s + TABLE[q, k]  # indices


def written(s, b, h, q, k):
    s[0] = 1.0  # write
    return s


def half(s, b, h, q, k):
    return s.half()  # half


def rounded(s, b, h, q, k):
    return s + (q - 3) ** k  # power


def large(s, b, h, q, k):
    for i in range(3000):
        s = s * (1.0 + i * 1e-3) + i  # large
    return s


def wide(s, b, h, q, k):
    return s + (q + 2**70)  # 64 bits


def too_many(s, b, h, q, k):
    return s + torch.zeros(1, 1, 1, 1, 1, 1)[b, b, b, b, b, q]  # dimensions


def doubled(s, b, h, q, k):
    return s + torch.zeros(4, dtype=torch.float64)[q]  # float64


def sparse(s, b, h, q, k):
    return s + TABLE.to_sparse()[q]  # sparse


def text(s, b, h, q, k):
    return s + "1"  # text


def rows(s, b, h, q, k):
    return s + torch.dot(MATRIX[h], TABLE[:5])  # rows


def lesser_bools(s, b, h, q, k):
    return s + ((q > k) - (k > q))  # bools


def looked_up(s, b, h, q, k):
    return s + {0: 1.0}.get(h, 2.0)  # dictionary


def small_power(s, b, h, q, k):
    return s + 2 ** (3 - q)  # power


def by_zero(s, b, h, q, k):
    return s + q // 0  # zero


def contained(s, b, h, q, k):
    return s * (q in TABLE)  # in


def chained(s, b, h, q, k):
    return torch.where(0 <= q - k < 5, s, 0.0)  # chain


def listed(s, b, h, q, k):
    return s * (q in (1, 2))  # list


def embedded(s, b, h, q, k):
    return s + torch.nn.functional.embedding(q, MATRIX, padding_idx=0)[h]  # embedding


CASES = {
    embedded: "embedding has padding_idx",
    contained: r"`in` looks for a value in a captured tensor.*torch\.isin\(value, row\)",
    chained: r"branches on a value.*in place of a < b < c \(a < b\) & \(b < c\)",
    listed: r"branches on a value.*in place of x in \(1, 2\) \(x == 1\) \| \(x == 2\)",
    branch: "branches on a value",
    both: "branches on a value",
    smallest: "torch.minimum",
    looped: "needs? a number",
    mathematical: "torch.exp",
    itemised: "Python",
    strange: "bessel_j0 has no rule",
    method: "method .cumsum has no rule",
    whole_table: r"shape \(4, 8\).*index the tensor",
    open_row: r"shape \(4, 8\)",
    real_index: "no whole number",
    sliced: "slice",
    sliced_by_values: "slice and values",
    many_indices: "2 indices",
    written: "writes",
    half: "float32",
    rounded: "power of whole numbers",
    large: f"more than {MAX_NODES} operations",
    wide: "64 bits",
    too_many: "6 dimensions",
    doubled: "float64",
    sparse: "not dense",
    text: "str",
    rows: "rows of 5 and 8",
    lesser_bools: "a bool",
    looked_up: "dictionary",
    small_power: "power of whole numbers",
    by_zero: "divided by the number 0",
    drawn: r"rand draws once .*mods\.random\(seed",
    drawn_table: "normal_ draws once",
    dropped: "dropout draws once",
}


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_the_line_and_the_way_out(function) -> None:
    with pytest.raises(ModError) as caught:
        trace(function)
    message = str(caught.value)
    assert message.startswith(f"score_mod {function.__name__} ")
    assert re.search(CASES[function], message), message
    (line,) = re.findall(rf"{re.escape(__file__)}:(\d+): ([^.]*)", message)
    source = open(__file__, encoding="utf-8").read().splitlines()[int(line[0]) - 1]  # noqa: SIM115
    assert "#" in source
    assert source.strip().startswith(line[1][:12])


def test_errors_of_the_function_itself_have_a_line() -> None:
    def wrong(b, h, q, k):
        return {}["missing"]

    with pytest.raises(
        ModError, match=r"raised KeyError: 'missing'.*test_mod_refusals.*called once"
    ) as caught:
        trace(None, wrong)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(ModError, match=r"raised TypeError.*mask_mod\(b, h, q_idx, kv_idx\)"):
        trace(None, lambda q, k: q >= k)


def test_what_a_function_returns() -> None:
    for returned in (None, "text", [1]):
        with pytest.raises(ModError, match="must return a number, the new score"):
            trace(lambda *_, x=returned: x)
    with pytest.raises(ModError, match=r"returns a number, at .*; it must return a bool.*compare it"):
        trace(None, lambda b, h, q, k: q - k)
    with pytest.raises(ModError, match=r"returns a bool, at .*; it must return a number.*where"):
        trace(lambda s, b, h, q, k: q > k)
    with pytest.raises(ModError, match="row of 8 values"):
        trace(None, lambda b, h, q, k: MATRIX[h] > 0)
    for wrong in (3, "causal", torch.ones(3)):
        with pytest.raises(
            TypeError, match=r"it must be a function mask_mod\(b, h, q_idx, kv_idx\), or None"
        ):
            trace(None, wrong)
    with pytest.raises(TypeError, match=r"a tensor of shape \(3,\) and torch.float32; .*dense_bias\(bias\)"):
        trace(torch.ones(3))
    with pytest.raises(TypeError, match=r"dense_mask\(mask\)"):
        trace(None, torch.ones(3))


def whole(b, h, q, k):
    return MATRIX > 0


class Called:
    def __call__(self, b, h, q, k):
        return q - k  # of an object


def too_few(b, h):
    return h > b


def test_the_line_of_the_function_where_no_line_of_it_is_wrong() -> None:
    here = r"test_mod_refusals\.py:\d+: "
    with pytest.raises(
        ModError, match=rf"whole tensor of shape \(4, 8\), at \S*{here}def whole.*mask\[q_idx"
    ):
        attention(*3 * [torch.zeros(1, 8, 1, 8).half()], mask_mod=whole)
    with pytest.raises(ModError, match=rf"{here}def __call__"):
        trace(None, Called())
    with pytest.raises(ModError, match=rf"2 positional arguments but 4.*{here}def too_few"):
        trace(None, functools.partial(too_few))
    with pytest.raises(ModError, match=r"relu raised TypeError: [^:]*\. It is called once"):
        trace(torch.relu)


def test_a_tensor_elsewhere() -> None:
    with pytest.raises(ModError, match=r"is on cpu, and the queries are on meta.*to\('meta'\)"):
        trace(lambda s, b, h, q, k: s + TABLE[q], device="meta")


def test_combinations_take_functions() -> None:
    for combine in (and_masks, or_masks):
        with pytest.raises(ValueError, match="at least one"):
            combine()
        with pytest.raises(TypeError, match=r"pass functions.*dense_mask\(mask\)"):
            combine(lambda b, h, q, k: q >= k, torch.ones(2, 2, dtype=torch.bool))


# ---------------------------------------------------------------------- what is taken
def mod_of(function, scored=True):
    return trace(function if scored else None, None if scored else function)


def test_control_flow_on_constants_vanishes() -> None:
    def made(kind, n):
        def mod(s, b, h, q, k):
            if kind == "alibi" and n > 3:
                for _ in range(2):
                    s = s + 1.0
            return s if n else s * 2

        return mod

    assert str(mod_of(made("alibi", 5)).mod) == "score = (score + 1.0) + 1.0"
    assert str(mod_of(made("none", 5)).mod) == "score = score"


def window(left):
    return lambda b, h, q, k: q - k <= left


def test_numbers_of_closures_are_arguments() -> None:
    narrow, broad = mod_of(window(5), False), mod_of(window(900), False)
    assert narrow.mod == broad.mod
    assert hash(narrow.mod) == hash(broad.mod)
    assert str(narrow.mod) == "visible = (q - k) <= n0"
    assert (narrow.numbers, broad.numbers) == ((5,), (900,))
    assert mod_of(window(2**40), False).mod != narrow.mod  # it has 64 bits
    assert mod_of(window(5.5), False).mod != narrow.mod


def test_numbers_of_numpy_in_closures_are_arguments_too() -> None:
    found = mod_of(window(np.int64(5)), False)
    assert found.mod == mod_of(window(900), False).mod
    assert found.numbers == (5,)
    assert type(found.numbers[0]) is int

    def scaled(n):
        return lambda s, b, h, q, k: s * n * n.dtype.itemsize

    traced = mod_of(scaled(np.float32(0.5)))
    assert traced.numbers == (0.5,)
    assert str(traced.mod) == "score = (score * n0) * 4.0"
    with pytest.raises(ModError, match="'int' object has no attribute 'dtype'"):
        mod_of(scaled(3))


def test_what_is_computed_of_numbers_is_one_number() -> None:
    def made(a, c):
        stop = a + c
        return lambda s, b, h, q, k: torch.where(k < stop, s * (a / c), s * (a // c - 1))

    traced = mod_of(made(7, 2))
    assert traced.numbers == (9, 3.5, 2)
    assert {n: len(traced.mod.numbers) for n in "x"} == {"x": 3}


def penalty(s, b, h, q, k, *, weight, start=4):
    return torch.where(k >= start, s - weight, s)


def nested(limit):
    inner = window(limit)

    def mask(b, h, q, k):
        return inner(b, h, q, k) & inner(b, h, k, q)

    return mask


class Scaled:
    factor = 3.0

    def __call__(self, s, b, h, q, k):
        return s * self.factor

    def method(self, s, b, h, q, k):
        return s + self.factor


def test_no_gradient_within_a_function_is_refused() -> None:
    table, learnt = torch.ones(4), torch.ones(4, requires_grad=True)

    def scaled(score, b, h, q, k, by=table):
        with torch.no_grad():
            factor = by[h] * 2.0 + torch.exp2(-(k - q) * 1.0)
        return score * factor

    def stopped(score, b, h, q, k):
        with torch.no_grad():
            factor = score.abs()
        return score * factor

    trace(scaled)
    for function in (stopped, functools.partial(scaled, by=learnt)):
        with pytest.raises(ModError, match=r"under torch\.no_grad, at .*test_mod_refusals.*\.detach\(\)"):
            trace(function)
        with torch.no_grad():
            trace(function)


def is_refused(function):
    try:
        trace(function)
    except ModError:
        return True
    return False


def test_operations_of_every_kind_are_counted() -> None:
    """Conversions and the result's own, too; the derivative of a large function may be larger."""

    def converted(score, b, h, q, k, before=0):
        for _ in range(before):
            score = -score
        for i in range(1, MAX_NODES // 4 - 1):
            score = score + (q + i).float()
        return score

    first = next(n for n in range(20) if is_refused(functools.partial(converted, before=n)))
    for before in range(first, first + 4):  # each of the four operations is once the first too many
        with pytest.raises(ModError, match=r"more than 2048 operations.*, at .*test_mod_ref.*as a tensor$"):
            trace(functools.partial(converted, before=before))

    def steep(score, b, h, q, k):
        for _ in range(600):
            score = score + torch.tanh(score) * 0.001
        return score

    large = derivative(mod_of(steep).mod).mod
    assert len(large.nodes) > MAX_NODES
    q = torch.randn(1, 8, 1, 8).half().requires_grad_()
    attention(q, q, q, score_mod=steep, softcap=5.0).sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


def test_functions_of_every_form() -> None:
    assert mod_of(functools.partial(penalty, weight=0.5)).numbers == (4, 0.5)
    assert mod_of(nested(6), False).numbers == (6,)
    assert str(mod_of(Scaled()).mod) == "score = score * 3.0"
    assert str(mod_of(Scaled().method).mod) == "score = score + 3.0"
    both = mod_of(and_masks(window(3), or_masks(window(9), lambda b, h, q, k: k == 0)), False)
    assert both.numbers == (3, 9)
    assert str(mod_of(lambda b, h, q, k: True, False).mod) == "visible = True"
    assert str(mod_of(lambda b, h, q, k: q.new_ones((), dtype=torch.bool), False).mod) == "visible = True"
    assert mod_of(lambda s, b, h, q, k: s * np.float32(0.5) + np.int64(3)).mod.numbers == ()


def test_a_function_that_counts_its_calls_is_called_once() -> None:
    calls = 0

    def counting(s, b, h, q, k):
        nonlocal calls
        calls += 1
        return s

    trace(counting)
    assert calls == 1


def test_a_function_within_counts_for_the_one_around_it() -> None:
    n = 0

    def function(score, b, h, q, k):
        def count():
            nonlocal n
            n += 1

        count()
        return score

    trace(function)
    assert n == 1


def test_a_number_that_changes_while_it_is_recorded() -> None:
    number = torch.tensor(2.0)

    def function(score, b, h, q, k):
        first = score * number
        return first + number.add_(1) * k

    traced = trace(function)
    assert traced.numbers == (2.0, 3.0)
    zero = 0.0

    def signed(score, b, h, q, k):
        return torch.maximum(score / (zero * 1.0), score / (zero * -1.0))

    assert [str(x) for x in trace(signed).numbers] == ["0.0", "-0.0"]


def test_equal_parts_stand_once_and_unused_ones_not_at_all() -> None:
    def mod(s, b, h, q, k):
        torch.exp(s)
        return s + TABLE[q - k] * TABLE[q - k] + (q - k)

    assert str(mod_of(mod).mod) == "x3 = (q - k)\nx4 = t0[x3]\nscore = (score + (x4 * x4)) + to_float(x3)"


def test_tensors_come_by_pointer() -> None:
    views = [TABLE[:4], TABLE[:4]]
    traced = mod_of(lambda s, b, h, q, k: s + views[0][q] + views[1][k])
    assert [t.data_ptr() for t in traced.tensors] == [TABLE.data_ptr()]  # one memory, one argument
    other = mod_of(lambda s, b, h, q, k: s + MATRIX[0][q] + MATRIX[0][k])
    assert other.mod == traced.mod
    assert mod_of(lambda s, b, h, q, k: s + MATRIX.half()[0][q] + MATRIX.half()[0][k]).mod != traced.mod
