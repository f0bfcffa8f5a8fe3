"""Forward passes of norms, MLPs, rotary embeddings and losses that run as one kernel each.

``functions`` is always :mod:`alto.kernels.layer_functions`, ``dtype`` the dtype of the activations.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alto.backbone.output_head import OutputHead
from alto.kernels import NormKind
from alto.kernels.layer_reference import cross_entropy, rms_norm, rotary, swiglu

# Copies of a model's modules with other, small weights, to test what a module's forward pass computes. This also works
# where the module's own weights are quantised or sharded.


def bare_copy(
    module: nn.Module, *, weights: Mapping[str, Tensor] | None = None, children: Mapping[str, nn.Module] | None = None
) -> Any:
    """Return a module of the same class and settings, without hooks, that has only these weights and submodules."""
    copy: Any = object.__new__(type(module))
    nn.Module.__init__(copy)
    internal = set(vars(copy))
    vars(copy).update({name: value for name, value in vars(module).items() if name not in internal | {"forward"}})
    for name, weight in (weights or {}).items():
        copy.register_parameter(name, nn.Parameter(weight, requires_grad=False))
    for name, child in (children or {}).items():
        copy.add_module(name, child)
    copy.training = False
    return copy


def is_near(found: Tensor, expected: Tensor, limit: float) -> bool:
    """Return whether all numbers differ by at most ``limit``, relative to the largest of their row; False for NaN."""
    largest = expected.double().abs().amax(-1, keepdim=True)
    return bool(((found.double() - expected.double()).abs() <= limit * largest).all())


@dataclass(slots=True)
class FusionTrial:
    """The use of a fused forward pass, beginning with the model's trial pass.

    Attributes:
        why_not: Why the module's own forward pass was used instead; empty if it never was.
    """

    is_over: bool = False
    why_not: str = ""


class FusedForward:
    """The ``forward`` attribute of a module that computes the same as the module's class with fewer kernels.

    It does not keep the module alive.

    Attributes:
        signature: Two forward passes with equal signatures launch the same kernels.
        trial: Its use so far; all modules that rotate with the same function share it.
    """

    op: ClassVar[str]

    def __init__(self, module: nn.Module, *signature: Any) -> None:
        self._module = weakref.ref(module)
        self.signature = (self.op, *signature)
        self.trial = FusionTrial()

    @property
    def module(self) -> Any:
        module = self._module()
        assert module is not None, "it is called by its module"
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def sample(self, dtype: torch.dtype, device: torch.device) -> None:
        """Launch the kernels of a training step once, forward and backward, on a few tokens."""
        raise NotImplementedError

    def own_forward(self, why: str, *args: Any, **kwargs: Any) -> Tensor:
        """Run the forward pass of the module's class, and record why it is used."""
        self.trial.why_not = why
        output: Tensor = type(self.module).forward(self.module, *args, **kwargs)
        return output


_LOSS_TOKENS, _MAX_TRIED = 3, 10_000
_MAX_ROUNDINGS = 4
"""Allowed difference of outputs and gradients; another order of summation changes them by two roundings at most."""


def why_no_kernel(head: OutputHead, functions: ModuleType) -> str:
    """Return why a kernel cannot compute the losses of the logits of ``head``; empty if it can.

    Args:
        head: The output head, already observed.
    """
    if head.scale is not None or head.softcap is not None:
        return "its logits are scaled" if head.softcap is None else "its logits are capped"
    weight_VH = head.linear.weight
    width = min(weight_VH.shape[0], _MAX_TRIED)
    generator = torch.Generator().manual_seed(0)
    logits_CV = (3 * torch.randn(_LOSS_TOKENS, width, generator=generator)).to(weight_VH.device, weight_VH.dtype)
    targets_C = torch.tensor([0, width // 2, width - 1], device=logits_CV.device)
    results = []
    for function in (functions.cross_entropy, cross_entropy):
        gradient_CV = logits_CV.clone()
        results.append((function(gradient_CV, targets_C, gradient_CV), gradient_CV))
    (losses_C, gradient_CV), (expected_C, expected_CV) = results
    is_same = is_near(losses_C, expected_C, 1e-5) and is_near(
        gradient_CV, expected_CV, _MAX_ROUNDINGS * torch.finfo(logits_CV.dtype).eps
    )
    return "" if is_same else "the kernel's numbers differ from those of PyTorch"


def sample_losses(head: OutputHead, dtype: torch.dtype, device: torch.device) -> None:
    """Launch the loss kernel of ``head`` once on one token, with and without a gradient."""
    if head.kernel is None:
        return
    logits_CV = torch.empty(1, head.linear.weight.shape[0], dtype=dtype, device=device)
    targets_C = torch.zeros(1, dtype=torch.long, device=device)
    for gradient_CV in (None, logits_CV):
        head.kernel(logits_CV, targets_C, gradient_CV)


_LINEAR_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate_up_proj", "down_proj"))
"""Names of the linear layers in transformers' gated MLPs. With two names, the first layer computes gate and up."""

_NUM_TOKENS, _WIDTH = 3, 40
_SIZES = (1.0, 10.0, 0.01)
"""Magnitudes of the test tokens."""


class FusedMlp(FusedForward):
    """The forward pass of a gated MLP."""

    op = "swiglu"

    def __init__(self, module: nn.Module, functions: ModuleType, names: tuple[str, ...]) -> None:
        super().__init__(module)
        self._functions, self._names = functions, names
        # The size is read before adapters are injected, because layers with adapters have no ``out_features``.
        self._width = getattr(module, names[0]).out_features // (2 if len(names) == 2 else 1)

    def __call__(self, x: Tensor) -> Tensor:
        first, *others, last = (getattr(self.module, name) for name in self._names)
        gate, up = (first(x), others[0](x)) if others else first(x).chunk(2, dim=-1)
        if gate.dtype != up.dtype:
            self.trial.why_not = f"its gate is {gate.dtype}, the other factor of the product {up.dtype}"
            unfused: Tensor = last(F.silu(gate) * up)
            return unfused
        output: Tensor = last(self._functions.swiglu(gate, up))
        return output

    def sample(self, dtype: torch.dtype, device: torch.device) -> None:
        is_joint, width = len(self._names) == 2, self._width
        both = torch.empty(2, 2 * width, dtype=dtype, device=device)
        halves = both.chunk(2, dim=-1)
        gate, up = (half.requires_grad_() if is_joint else torch.empty_like(half).requires_grad_() for half in halves)
        self._functions.swiglu(gate, up).backward(torch.empty(2, width, dtype=dtype, device=device))


def linear_names(module: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the linear layers of a gated MLP; None if ``module`` does not have its structure: linear
    layers, at most an activation, and nothing else."""
    children = dict(module.named_children())
    for names in _LINEAR_NAMES:
        others = [child for name, child in children.items() if name not in names]
        has_weights = any(True for other in others for _ in (*other.parameters(), *other.buffers()))
        if set(names) <= set(children) and len(others) <= 1 and not has_weights and not module._parameters:
            return names
    return None


def why_unfused(
    module: nn.Module, names: tuple[str, ...], functions: ModuleType, dtype: torch.dtype, device: torch.device
) -> str:
    """Return why the kernel cannot replace activation and product in an MLP; empty if it can.

    The class of the MLP is run with linear layers that return random numbers. The input of the last linear layer must
    be bit-identical to ``silu(gate) · up``.

    Args:
        names: Its :func:`linear_names`.
    """
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        numbers = torch.randn(_NUM_TOKENS, _WIDTH, generator=generator) * torch.tensor(_SIZES)[:, None]
        return numbers.to(device, dtype)

    x, dy = draw(), draw()
    leaves = [draw().requires_grad_() for _ in range(2)]
    with torch.enable_grad():
        given = leaves if len(names) == 3 else [torch.cat(leaves, dim=-1)]
        gate, up = leaves if len(names) == 3 else given[0].chunk(2, dim=-1)
        stubs: dict[str, nn.Module] = {name: _Given(x, y) for name, y in zip(names, given, strict=False)}
        own = {name: child for name, child in module.named_children() if name not in names}
        try:
            expected = bare_copy(module, children={**own, **stubs, names[-1]: nn.Identity()})(x)
        except Exception:  # an unknown forward pass may raise anything
            return "its forward pass is different"
        if not isinstance(expected, Tensor) or not torch.equal(expected, swiglu(gate, up)):
            return "its activation is not silu(gate) · up"
        actual: Tensor = functions.swiglu(gate, up)
        gradients: list[Any] = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for y in (actual, expected)]
    pairs = [(actual.detach(), expected.detach()), *zip(*gradients, strict=True)]
    if not all(is_near(one, other, _MAX_ROUNDINGS * torch.finfo(dtype).eps) for one, other in pairs):
        return "the kernel's numbers differ from its own"
    return ""


class _Given(nn.Module):
    """A replacement for a linear layer that returns ``y`` for the input ``x``."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self._x, self._y = x, y

    def forward(self, x: Tensor) -> Tensor:
        assert x is self._x, "a different input than the module's own"
        return self._y


_EPSILONS = ("variance_epsilon", "eps")
"""Names of the attribute of transformers' norms that holds the epsilon, which is added to the mean square."""

_ROW_SIZES = (1.0, 1e-3, 30.0, 0.0, 1.0)
"""Magnitudes of the test rows; the mean square of the second row is close to a typical epsilon."""


class FusedNorm(FusedForward):
    """The forward pass of an RMS norm."""

    op = "rms_norm"

    def __init__(self, module: nn.Module, functions: ModuleType, kind: NormKind, epsilon: float) -> None:
        super().__init__(module, _width(module), epsilon, kind)
        self._functions, self._epsilon, self._kind = functions, epsilon, kind

    def __call__(self, x: Tensor) -> Tensor:
        weight_H: Any = self.module.weight
        if weight_H.requires_grad:
            return self.own_forward("its weight is trained", x)
        if x.dtype != weight_H.dtype:
            return self.own_forward(f"its weight is {weight_H.dtype}, its input {x.dtype}", x)
        y: Tensor = self._functions.rms_norm(x, weight_H, self._epsilon, self._kind)
        return y

    def sample(self, dtype: torch.dtype, device: torch.device) -> None:
        x = torch.empty(2, _width(self.module), dtype=dtype, device=device)
        y = self._functions.rms_norm(x[:1].requires_grad_(), x[1], self._epsilon, self._kind)
        y.backward(torch.empty_like(y))


def norm_signature(module: nn.Module) -> tuple[Any, ...] | None:
    """Return everything except the weights that determines the result of an RMS norm. Return None if ``module`` does
    not have the structure of an RMS norm: one weight for each number of a row, an epsilon, and nothing else."""
    weight = module._parameters.get("weight")
    has_more = len(module._parameters) != 1 or any(module.children()) or any(module.buffers())
    if weight is None or weight.dim() != 1 or has_more or isinstance(module, nn.LayerNorm):
        return None
    epsilons = tuple(vars(module).get(name) for name in _EPSILONS)
    return None if epsilons == (None, None) else (type(module), epsilons, tuple(weight.shape), weight.dtype)


def fused_norm(module: nn.Module, functions: ModuleType, device: torch.device) -> tuple[NormKind, float] | str:
    """Return the kind and the epsilon of an RMS norm, or the reason why no kernel can replace it.

    The class of the norm is run on random rows with random weights. Its outputs must be bit-identical to those of a
    known kind. Outputs and gradients must equal the kernel's up to rounding.

    Args:
        module: An RMS norm: :func:`norm_signature` is not None.
    """
    epsilon = next(value for name in _EPSILONS if (value := vars(module).get(name)) is not None)
    weight: Any = module.weight
    width, dtype = _width(module), weight.dtype
    if not isinstance(epsilon, float) or not 1 < width <= functions.MAX_NORM_WIDTH:
        return f"its rows have {width} numbers, its epsilon is {epsilon!r}"
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rows = draw(len(_ROW_SIZES), width) * torch.tensor(_ROW_SIZES)[:, None]
    x, dy = rows.to(device, dtype).requires_grad_(), draw(*rows.shape).to(device, dtype)
    weight_H = (1 + draw(width) / 4).to(device, dtype)
    with torch.enable_grad():
        expected: Tensor = bare_copy(module, weights={"weight": weight_H})(x)
        [expected_dx] = torch.autograd.grad(expected, x, dy)
        kinds = [kind for kind in NormKind if _is_same_norm(rms_norm(x, weight_H, epsilon, kind), expected)]
        if not kinds:
            return "its numbers match no known kind of RMS norm"
        found: Tensor = functions.rms_norm(x, weight_H, epsilon, kinds[0])
        [found_dx] = torch.autograd.grad(found, x, dy)
    limit = _MAX_ROUNDINGS * torch.finfo(dtype).eps
    if not is_near(found.detach(), expected.detach(), limit) or not is_near(found_dx, expected_dx, limit):
        return "the kernel's numbers differ from its own"
    return kinds[0], epsilon


def _width(module: nn.Module) -> int:
    weight: Any = module.weight
    width: int = weight.shape[0]
    return width


def _is_same_norm(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


_NAME = "apply_rotary_pos_emb"
"""Name of the rotating function in every model of transformers."""

_NO_EFFECT = "transformers.utils.deprecation"
"""Module of decorators that only rename arguments of earlier versions."""


class Rotation:
    """A replacement for a model's function that rotates queries and keys.

    The layouts of queries and keys are recorded in the trial pass.

    Args:
        dtypes: Pairs of dtypes, of queries and of cosines, for which the kernel gives the numbers of ``function``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        functions: ModuleType,
        dtypes: frozenset[tuple[torch.dtype, torch.dtype]],
    ) -> None:
        self._function, self._functions, self._dtypes = function, functions, dtypes
        self.trial = FusionTrial()
        self._seen: set[tuple[Any, ...]] = set()

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        why_not = self._why_not(q, k, cos, sin) if not args and not kwargs else "it is called with additional arguments"
        if why_not:
            self.trial.why_not = why_not
            return self._function(q, k, cos, sin, *args, **kwargs)
        if not self.trial.is_over:
            self._seen.add((q.shape[1], q.stride(), k.shape[1], k.stride(), q.shape[3], cos.dtype))
        return self._functions.rotary(q, k, cos, sin)

    def sample(self, dtype: torch.dtype, device: torch.device) -> None:
        """See :meth:`FusedForward.sample`."""
        for num_q, strides_q, num_k, strides_k, width, angles in self._seen:
            q, k = (
                torch.empty_strided((1, heads, 2, width), strides, dtype=dtype, device=device)
                for heads, strides in ((num_q, strides_q), (num_k, strides_k))
            )
            cos = torch.empty(1, 2, width, dtype=angles, device=device)
            outputs = self._functions.rotary(q.requires_grad_(), k.requires_grad_(), cos, cos)
            torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])

    def _why_not(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> str:
        if q.dim() != 4 or cos.dim() != 3 or q.shape[2] != cos.shape[1] or cos.shape[0] not in (1, q.shape[0]):
            return f"queries are {tuple(q.shape)}, cosines {tuple(cos.shape)}"
        widths = {x.shape[-1] for x in (q, k, cos, sin)}
        if len(widths) > 1 or widths.pop() % 2:
            return f"heads of {q.shape[-1]} numbers have {cos.shape[-1]} cosines"
        if q.dtype != k.dtype or cos.dtype != sin.dtype or (q.dtype, cos.dtype) not in self._dtypes:
            return f"queries are {q.dtype}, cosines {cos.dtype}"
        return ""


class FusedRotary(FusedForward):
    """The forward pass of an attention module, which calls ``rotation``."""

    op = "rotary"

    def __init__(self, module: nn.Module, forward: Callable[..., Any], rotation: Rotation) -> None:
        super().__init__(module, id(rotation))
        self._forward, self._rotation = forward, rotation
        self.trial = rotation.trial

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self.module, *args, **kwargs)

    def sample(self, dtype: torch.dtype, device: torch.device) -> None:
        self._rotation.sample(dtype, device)


def rotating_function(kind: type[nn.Module]) -> FunctionType | None:
    """Return the undecorated ``forward`` of a class if it calls the function that rotates queries and keys; else
    None."""
    function = inspect.unwrap(kind.forward)
    if not isinstance(function, FunctionType) or _NAME not in function.__code__.co_names:
        return None
    return function if _NAME in function.__globals__ else None


def fused_rotation(
    kind: type[nn.Module], function: FunctionType, functions: ModuleType, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[..., Any], Rotation] | str:
    """Return a forward pass for ``kind`` that rotates with the kernel, and this rotation; or a reason if there is none.

    The module of transformers is not changed: the new function has the same code as ``function`` but other globals.

    Args:
        function: Its :func:`rotating_function`.
    """
    wrapper: Any = kind.forward
    while wrapper is not function:
        if wrapper.__globals__["__name__"] != _NO_EFFECT:
            return f"its forward pass has a decorator of {wrapper.__globals__['__name__']}"
        wrapper = wrapper.__wrapped__
    own = function.__globals__[_NAME]
    wide = torch.float32  # dtype of some models' cosines, and of all tensors when a model is checked in float32
    pairs = dict.fromkeys([(dtype, dtype), (dtype, wide), (wide, wide)])
    dtypes = frozenset(pair for pair in pairs if _is_same_rotation(own, functions, *pair, device))
    if not any(of_queries == dtype for of_queries, _ in dtypes):
        return "its rotation is different"
    rotation = Rotation(own, functions, dtypes)
    made = FunctionType(
        function.__code__,
        {**function.__globals__, _NAME: rotation},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made, rotation


def _is_same_rotation(
    own: Callable[..., Any], functions: ModuleType, dtype: torch.dtype, angle: torch.dtype, device: torch.device
) -> bool:
    """Return whether ``own`` is bit-identical to the reference, and equal to the kernel up to rounding."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    q, k, dq, dk = (draw(1, 5, heads, 16).to(dtype).transpose(1, 2) for heads in (4, 2, 4, 2))
    angles_1TD = draw(1, 5, 16)
    cos, sin = angles_1TD.cos().to(angle), angles_1TD.sin().to(angle)
    leaves = [q.requires_grad_(), k.requires_grad_()]
    with torch.enable_grad():
        try:
            expected = own(*leaves, cos, sin)
            is_same = all(
                one.dtype == other.dtype and torch.equal(one, other)
                for one, other in zip(expected, rotary(q, k, cos, sin), strict=True)
            )
        except Exception:  # an unknown function may raise anything
            return False
        if not is_same:
            return False
        found = functions.rotary(*leaves, cos, sin)
        gradients = [torch.autograd.grad(outputs, leaves, [dq, dk]) for outputs in (found, expected)]
    limit = _MAX_ROUNDINGS * torch.finfo(dtype).eps
    pairs = (*zip(found, expected, strict=True), *zip(*gradients, strict=True))
    return all(is_near(one.detach(), other.detach(), limit) for one, other in pairs)
