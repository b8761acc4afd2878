"""From a problem to the kernel that runs it here: remembered choices, their explanation, building ahead.

``attention`` and ``explain_choice`` take the same way: the pure choice (``select``), then what is available.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flash_attention.call import Mask, Scores, problem_of, shifted
from flash_attention.checks import calls as checks
from flash_attention.checks.keywords import named_keywords
from flash_attention.checks.options import checked_scale, given
from flash_attention.checks.tensors import check_output_kind, records_gradients
from flash_attention.devices import DEVICE_TYPES, backend, chooser
from flash_attention.mods.tracing import trace
from flash_attention.options import MaskMod, Options, ScoreMod
from flash_attention.run.asked_layout import AskedRows, has_gradients
from flash_attention.run.document_calls import packed_form
from flash_attention.run.functions import mask_function
from flash_attention.run.plain_forms import mask_and_scores
from flash_helpers import build, generation
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.kernel import BackwardConfig, ForwardConfig, KernelConfig
from flash_helpers.kernels.problem import BACKWARD, FORWARD, UNLIMITED, AttentionProblem, Window
from flash_helpers.select.chosen import Choice
from flash_helpers.select.no_kernel import NoKernel, no_kernel

CHOICES_KEPT = 1024  # problems whose choice is remembered

Asked = tuple[AttentionProblem, torch.device, KernelConfig | None]
_choices: dict[Asked, Choice] = {}  # of this generation


def choose(problem: AttentionProblem, device: torch.device, config: KernelConfig | None) -> Choice:
    """What runs a problem on a device that is there. A kernel that is not built is compiled.

    Args:
        problem: the problem.
        device: where.
        config: the configuration that the caller insists on; None: choose.

    Raises:
        NoKernelError: no kernel computes the problem.
        InfeasibleConfigError: ``config`` does not.
        ValueError: more thread blocks than one launch holds.
        BuildError, OSError: the kernel could not be compiled, and no other is built.
    """
    asked = (problem, device, config)
    if (known := _choices.get(asked)) is not None:
        return known
    generation.follow_environment()
    begun = generation.number()
    choice = _choice(problem, device, config, explained=False)
    with generation.lock:
        if begun == generation.number():
            if len(_choices) >= CHOICES_KEPT:
                del _choices[next(iter(_choices))]
            _choices[asked] = choice
    return choice


def choose_with_gradients(
    problem: AttentionProblem,
    device: torch.device,
    config: KernelConfig | None = None,
    backward_config: KernelConfig | None = None,
    deterministic: bool = False,
    captured_gradients: tuple[int, ...] = (),
) -> tuple[Choice, Choice]:
    """What runs a problem and then its gradients. Where neither kernel is built, both are compiled at once.

    Args:
        problem: that of the forward pass.
        device: as of ``choose``.
        config: of the forward pass, as of ``choose``.
        backward_config: of the backward pass, likewise.
        deterministic: the gradients have to be the same bits in every run.
        captured_gradients: places of captured tensors whose gradients will be wanted.

    Returns:
        the choice for the forward pass, and that for the backward pass.

    Raises:
        as ``choose``.
    """
    gradients = problem.backward(deterministic, captured_gradients)
    known = (problem, device, config) in _choices and (gradients, device, backward_config) in _choices
    if device.type == "cuda" and not known:
        cuda = backend("cuda")
        facts, where = cuda.device_facts_of(device), str(device)
        both = [(problem, config), (gradients, backward_config)]
        choices = [
            chooser("cuda").choice_for(each, facts, where, named, explained=False) for each, named in both
        ]
        cuda.build_at_once([choice.kernel for choice in choices], device)
    return choose(problem, device, config), choose(gradients, device, backward_config)


@generation.forgets
def _forget() -> None:
    _choices.clear()


def _choice(
    problem: AttentionProblem, device: torch.device, config: KernelConfig | None, explained: bool
) -> Choice:
    """As ``choose``; with ``explained``, all other candidates are judged too, and nothing is built."""
    choice: Choice = chooser(device.type).choice_on(problem, device, config, explained)
    return choice


@named_keywords
def explain_choice(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window = UNLIMITED,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    config: ForwardConfig | None = None,
    backend: str | None = None,
    diagonal_offset: int = 0,
    out_dtype: torch.dtype | None = None,
    n_sms: int | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    facts: DeviceFacts | None = None,
    direction: str = FORWARD,
    deterministic: bool = False,
    backward_config: BackwardConfig | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    numerics: str | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    n_splits: int | None = None,
    validate: bool = False,
) -> Choice | NoKernel:
    """What ``attention`` would run with these arguments, why, and why not the others. Runs nothing.

    Where the call needs no kernel, because it is empty or its mask hides all keys, ``kernel`` is None and the
    reason says so. Counts of 0, which only a tensor says, take one.

    With ``cu_seqlens_q`` it is about ``attention_varlen``, with ``seqused_k`` alone, which may have a
    ``block_table``, about ``attention_cached``. No number of their tensors is read. What a mask of documents
    captured on a GPU is read, as by ``attention``.

    Where gradients are wanted, because an input requires grad or ``backward_config`` is given, the choice of
    the forward pass has that of the backward pass beside it, as ``gradients``.

    Args:
        direction: ``forward``, or ``backward``: what would compute the gradients, alone.
        deterministic: of the gradients: equal calls have to give equal bits.
        facts: choose for this GPU, which need not be there, by the same tuning results as there, e.g.
            ``flash_helpers.kernel_configs.device_facts("H100")``; the tensors may be meta tensors then. None:
            for the device of the tensors.
        q, k, v and the others: as in ``attention``, ``attention_varlen`` and ``attention_cached``. The
            factor of the scores, ``dropout_seed`` and ``validate`` have no influence.

    Raises:
        as ``attention``.
    """
    causal, window = shifted(causal, window, diagonal_offset)
    options = Options(
        causal,
        softmax_scale,
        window,
        softcap,
        sinks,
        return_lse,
        out,
        config,
        backend,
        out_dtype,
        n_sms,
        deterministic,
        backward_config,
        score_mod,
        mask_mod,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        numerics=numerics,
    ).checked(q)
    if not (facts is None or isinstance(facts, DeviceFacts)):
        raise TypeError(f"facts is {facts!r}; it must be DeviceFacts, e.g. device_facts('H100'), or None")
    if direction not in (FORWARD, BACKWARD):
        raise ValueError(f"direction is {given(direction)}; it must be {FORWARD!r} or {BACKWARD!r}")
    with_gradients = backward_config is not None or records_gradients(q, k, v, sinks)
    if options.deterministic and direction == FORWARD and not with_gradients:
        raise ValueError(
            f"deterministic=True with direction={FORWARD!r}: the forward pass always is. It is a question "
            f"about gradients: pass direction={BACKWARD!r} too, or tensors that require grad"
        )
    if n_sms is not None and (direction != FORWARD or backward_config is not None):
        raise ValueError("kernels of gradients keep to no limit of SMs: pass n_sms=None")
    if config is not None and direction != FORWARD:
        raise ValueError(
            "config names a kernel of the forward pass, which direction='backward' does not ask about: pass "
            "backward_config for the kernel of the gradients"
        )
    if facts is None and isinstance(q, Tensor) and q.is_meta:
        raise ValueError(
            "q is a meta tensor, which says no GPU: pass facts=, the GPU to choose for, such as "
            "flash_helpers.kernel_configs.device_facts('H100')"
        )
    longest = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    layout = AskedRows(*longest, seqused_q, seqused_k, block_table, n_splits, validate).layout()
    if (with_gradients or direction != FORWARD) and not has_gradients(layout):
        raise NotImplementedError(
            "gradients are asked about, and keys in pages, and packed queries with counts, have none: pass "
            f"direction={FORWARD!r}, no backward_config, and tensors that do not require grad"
        )
    layout.check_numbers()
    device_types = DEVICE_TYPES if facts is None else (*DEVICE_TYPES, "meta")
    checks.check_inputs(
        q, k, v, sinks, layout.axes, layout.paged, device_types=device_types, layout_kv=layout.axes_kv
    )
    layout.check(q, k)
    scale = checked_scale(softmax_scale, q.shape[-1])
    if out is not None:
        check_output_kind("out", out, (*q.shape[:-1], v.shape[-1]), options.out_dtype or q.dtype, q.device)
    traced = trace(score_mod, mask_function(mask_mod, q, k, layout)) if options.has_mods else None
    mask, scores = mask_and_scores(
        Mask.of(options.causal, options.window), Scores(scale, options.softcap, sinks, traced), layout,
        *layout.sizes(q, k)[1:],
    )  # fmt: skip

    def problem_asked(*rows: Any) -> AttentionProblem:
        return problem_of(
            *rows,
            lse=options.return_lse or (with_gradients and (facts is not None or q.device.type != "cpu")),
            out_float32=options.out_dtype is torch.float32,
            n_sms=options.n_sms,
            dropout=options.dropout_p > 0,
            invariant=options.numerics is not None,
        )

    problem = problem_asked(q, k, v, mask, scores, layout)
    if facts is None and no_kernel(problem) is None:
        gradients_follow = with_gradients or direction != FORWARD
        form = packed_form(q, k, v, mask, scores, layout, options, (out,), with_gradients=gradients_follow)
        if form is not None:  # all of its calls are the same problem
            rows = (form.rows(x)[0] for x in (q, k, v))
            problem = problem_asked(*rows, form.mask, form.scores, form.layouts[0])
    generation.follow_environment()

    def explained(asked: AttentionProblem, named: KernelConfig | None) -> Any:
        """A ``Choice``, or ``NoKernel``: of both passes, or of neither."""
        nothing = no_kernel(asked)
        if nothing is not None and named is None:
            return nothing
        if facts is not None:
            choice = chooser("cuda").choice_for(asked, facts, facts.name, named, explained=True)
        else:
            choice = _choice(asked, q.device, named, explained=True)
        return nothing or choice  # one that is named is refused where it cannot compute this

    gradients = problem.backward(options.deterministic)
    if direction != FORWARD:
        return explained(gradients, backward_config)
    choice = explained(problem, config)
    if not with_gradients or n_sms is not None:
        return choice
    return replace(choice, gradients=explained(gradients, backward_config))


def _device(device: torch.device | str) -> torch.device:
    if isinstance(device, str | torch.device):
        with contextlib.suppress(RuntimeError):  # a name that torch does not know
            known = torch.device(device)
            if known.type == "cuda" and known.index is None and torch.cuda.is_available():
                return torch.device("cuda", torch.cuda.current_device())
            if known.type in DEVICE_TYPES:
                return known
    raise ValueError(f"device is {given(device)}; it must be 'cuda', 'cuda:N' or 'cpu'")


@named_keywords
def prepare(
    problems: Iterable[AttentionProblem], device: torch.device | str = "cuda"
) -> list[Choice | NoKernel]:
    """Builds and loads what a list of problems needs, so that no later call compiles anything.

    Tuning results, environment variables and what is built are looked at anew, and all later calls choose by
    them; ``prepare([])`` does that alone.

    Args:
        problems: the problems.
        device: a CUDA device that is there; on the CPU there is nothing to build.

    Returns:
        The choice for each problem, as ``attention`` makes it from now on. Nothing is built for one that
        needs no kernel.

    Raises:
        TypeError, ValueError: one is no AttentionProblem, or one that no tensors have.
        NoKernelError: no kernel computes one of the problems.
        KernelCompileError, CompilerNotFoundError: building failed.
    """
    if isinstance(problems, AttentionProblem):
        raise TypeError("problems is one AttentionProblem; it must be several: pass [problem]")
    if not isinstance(problems, Iterable) or isinstance(problems, Tensor):
        raise TypeError(f"problems is {given(problems)}; it must be a list of AttentionProblem")
    problems, device = list(problems), _device(device)
    for problem in problems:
        checks.check_problem(problem)
    problems = [problem.without_idle_limits() for problem in problems]  # as calls ask for them
    generation.begin()
    if device.type == "cuda" and problems:
        cuda = backend("cuda")
        facts = cuda.device_facts_of(device)
        kernels = dict.fromkeys(
            chooser("cuda").choice_for(problem, facts, str(device), None, explained=False).kernel
            for problem in problems
            if no_kernel(problem) is None
        )
        missing = [kernel for kernel in kernels if cuda.load_kernel(kernel, facts.target) is None]
        if missing:
            build.build_kernels(missing, [facts.target])
        for kernel in kernels:
            cuda.get_kernel(kernel, device)
    return [no_kernel(problem) or choose(problem, device, None) for problem in problems]
