"""``KFAC``, for large batches: it has no learning rate, and finds step size, momentum and damping in every step.

A step is that of Martens & Grosse (2015), sections 6.4 to 6.6 and 7. The directions are the preconditioned gradient and
the last update. Their coefficients minimise the exact quadratic model of the batch's loss along both. The damping
follows from how well that model predicted the loss. The mathematics is in :mod:`~kfac_optim.selftuning.quadratic` and
:mod:`~kfac_optim.selftuning.objective`.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..bases import Bucket, gradients_of
from ..bases.state_keys import LAST_UPDATE
from ..capture import Fisher, RandomState, Replay, repeating
from ..common.checks import is_positive, require_number
from ..common.rates import rate_of
from ..common.user_warning import warn_user
from ..config import engine_options, refuse_unknown
from ..distributed import is_sharded
from ..optimizers import KFACMixin
from ..schedules import growing
from ..stacks import by_parameter
from .objective import Objective
from .quadratic import LevenbergMarquardt, SecantCheck

Change = Callable[[Tensor], float]

# Engine options that users cannot give; the solver is the default of KFACMixin, because the damping changes every step.
_GIVEN = ("damping", "scaling", "solver")
_TRIALS = 10  # how many dampings the search for the first one tries
_BUMP = 2  # how many worse trials in a row the search looks beyond
_CLOSURE_STEPS = 5  # from one additional evaluation of a closure to the next
_TELLING = 0.5  # along smaller shares of a step (warm-up), slopes differ by their batches rather than by curvature


class KFAC(KFACMixin, torch.optim.Optimizer):
    """K-FAC without a learning rate (Martens & Grosse 2015), which sets step size, momentum and damping itself.

    It is used in the ordinary loop, ``zero_grad()``, ``backward()``, ``step()``, with large batches. In every step it
    evaluates the model a few more times, without gradients, on a part of the batch. The loss has to be the mean
    negative log likelihood of the distribution that ``fisher`` names; for any other loss, give ``step`` a closure,
    which it evaluates once more in every fifth step.

    Args:
        model: The module whose output the loss is computed from; raw, or wrapped by DDP.
        fisher: The distribution of the output: "categorical" (cross-entropy), "bernoulli" (binary cross-entropy with
            logits), "gaussian" (half squared error; ``Gaussian(variance=0.5)`` for ``nn.MSELoss``), or a
            :class:`~kfac_optim.Fisher` of your own that has ``root`` and ``divergence``.
        damping: lambda in the first step, > 0. None (default): the first step finds it.
        least_damping: The value below which lambda does not fall, > 0. Default 1e-5.
        model_fraction: The share of the examples on which the model is evaluated again, in (0, 1], default 0.25; at
            least 256 examples, or all if there are fewer.
        **options: Those of :class:`~kfac_optim.CurvatureEngine`, without ``damping``, ``scaling`` and ``solver``.
            Other defaults: ``inv_update_steps=growing(0.1, minimum=5)``. Statistics are collected in the same steps
            only (``factor_update_steps``), each from a large batch, and are forgotten faster (``factor_decay=0.75``).
            On CPUs, blocks of factors have at most 2100 rows (``max_factor_dim``) instead of 300, with which an
            autoencoder ended at 41.0 instead of 39.5.

    In ``param_groups[0]``, "damping" is the present lambda, which may be set. "learning_rate" and "momentum" are the
    coefficients of the last step. "reduction_ratio" is the actual divided by the predicted fall of the loss; if it is
    negative, the step was undone. "lr", 1.0, is the share of the computed step to take, for schedulers to change.

    Raises:
        TypeError: If an argument is unknown or of the wrong kind, ``model`` is no module, ``fisher`` can only draw
            samples, or the parameters are sharded (FSDP2) or neither float32 nor float64.
        ValueError: If a value is out of range, or no layer of the model is preconditioned.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fisher: Fisher | str,
        damping: float | None = None,
        least_damping: float = 1e-5,
        model_fraction: float = 0.25,
        **options: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model={type(model).__name__}: must be an nn.Module, which KFAC calls in every step")
        if fisher == "empirical":
            raise ValueError("fisher='empirical': must be the distribution of the model's output, as 'categorical' is")
        if isinstance(fisher, Fisher) and (lacking := fisher.lacks("root", "divergence")):
            raise TypeError(
                f"fisher={type(fisher).__name__}: KFAC multiplies by the Fisher matrix of the output distribution, for "
                f"which it lacks {' and '.join(f'{name}()' for name in lacking)}: see kfac_optim.Fisher"
            )
        _check_parameters(p for p in model.parameters() if p.requires_grad)
        if damping is not None:
            require_number("damping", damping, "> 0 and finite", is_positive)
        require_number("least_damping", least_damping, "> 0 and finite", is_positive)
        require_number("model_fraction", model_fraction, "> 0 and at most 1", lambda x: 0 < x <= 1)
        if own := [name for name in ("lr", "scaling", "solver") if name in options]:
            raise TypeError(
                f"{type(self).__name__} got an unexpected keyword argument {own[0]!r}: leave it out, as KFAC has no "
                "learning rate, no scaling, and one solver"
            )
        refuse_unknown(type(self).__name__, options, [name for name in engine_options() if name not in _GIVEN])
        self.lambda_, self.model_fraction = LevenbergMarquardt(least_damping), model_fraction
        groups = {"lr": 1.0, "damping": float(damping or 0.0)}
        groups |= {"learning_rate": 0.0, "momentum": 0.0, "reduction_ratio": 1.0}
        interval = options.get("inv_update_steps", growing(0.1, minimum=5))
        often = {"inv_update_steps": interval, "factor_update_steps": interval}
        largest_block = 2100 if all(p.is_cpu for p in model.parameters()) else "auto"
        defaults = {**often, "factor_decay": 0.75, "max_factor_dim": largest_block}
        options = {**defaults, **options, "fisher": fisher, "damping": self.lambda_}
        super().__init__(model, groups, precondition="gradient", scaling=None, **options)
        if not self.curvature.layers:  # the layers tell whether a backward pass adds to the gradients
            self.curvature.close()
            raise ValueError(
                f"model={type(model).__name__}: KFAC preconditions none of its layers; take an optimizer of torch's"
            )
        self._watch_calls()

    def _watch_calls(self) -> None:
        """Builds the parts that copies and pickles leave out."""
        engine, fisher = self.curvature, self._fisher
        self._secant = SecantCheck()
        self._replay = Replay(
            cast(nn.Module, engine.stages.trained.model), fisher, engine.stages.loss_terms, lambda: engine.layers
        )

    @property
    def _fisher(self) -> Fisher:
        """The distribution of the output."""
        return cast(Fisher, self.curvature.fisher)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; also forgets what was recorded of backward passes that no step has used."""
        super().zero_grad(set_to_none)
        if "_replay" in self.__dict__:
            self._replay.discard()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "curvature" in self.__dict__:
            self._watch_calls()

    # The step -------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step.

        Args:
            closure: Clears the gradients, evaluates the loss, calls ``backward()`` and returns the loss. It is needed
                if the loss is not the distribution's mean negative log likelihood.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: If no call of the model was seen; in the first step without a closure, if the loss cannot be
                the mean negative log likelihood of ``fisher``.
        """
        return super().step(None if closure is None else _Closure(closure, self._parameters()[0].device))

    def _update_weights(self, buckets: Sequence[Bucket], closure: Callable[[], Any] | None) -> None:
        engine, gradients = self.curvature, gradients_of(buckets)
        self._require_own_curvature()
        if not gradients:
            return
        _check_parameters(gradients)
        self.lambda_.set(self.param_groups[0]["damping"])
        first, scaler = not (engine.step_count and self.lambda_.value), engine.grad_scaler
        parts, terms = self._replay.take(1.0 if first else self.model_fraction, scaler.get_scale() if scaler else 1.0)
        interval = 1 if closure is None else _CLOSURE_STEPS  # from one step whose loss is evaluated to the next
        evaluates = engine.step_count % interval == 0
        overwrites = closure is not None and (first or evaluates)  # it is called again, and clears the gradients
        if overwrites:
            gradients = {p: g.clone() for p, g in gradients.items()}
        objective = Objective(gradients, parts, terms, self._fisher, engine.stages.comm)
        change: Change = objective.change
        if isinstance(closure, _Closure):
            change = functools.partial(self._change_of, closure, objective)
        try:
            if first:
                self._start(objective, change, canonical=closure is None)
            if self.lambda_.value:
                self._take_best(objective, change if evaluates else None, interval)
        except BaseException:
            objective.put_back()
            raise
        finally:
            if overwrites:
                for p, g in gradients.items():
                    p.grad = g

    def _require_own_curvature(self) -> None:
        """Raises an error if the curvature is closed, or has options that ``KFAC`` sets by itself."""
        engine = self.curvature
        if engine.stages.closed:
            self._replay.close()
            raise RuntimeError("the curvature of this optimizer is closed, and KFAC has nothing else: build a new one")
        for name, own in (("damping", self.lambda_), ("scaling", None)):
            if getattr(engine, name) is not own:
                raise ValueError(
                    f"curvature.{name} was set, but KFAC finds its damping and the length of its steps by itself: set "
                    f"curvature.{name} = {'optimizer.lambda_' if own else None} again; the present damping, which may "
                    "be changed, is optimizer.param_groups[0]['damping']"
                )

    def _start(self, objective: Objective, change: Change, *, canonical: bool) -> None:
        """Checks the loss and, unless it was given, finds the first damping.

        The search begins at the curvature along the gradient, and divides by ten while a trial step lowers the loss by
        over a tenth more than the best one so far. Otherwise it ends: with the damping just tried, if that brought over
        half of the best fall, because a damping that is too small rises fast and one that is too large falls slowly;
        else with the best, but only after up to two more trials, as on some networks the loss is higher in between.
        """
        along = objective.model([[-g for g in objective.gradients.values()]], None)
        if not along.products > 0:  # all gradients are 0, as in a step that torch.distributed.checkpoint takes
            return
        if canonical:
            objective.check()
        if self.lambda_.value:
            return
        damping = float(along.curvatures / along.products)
        good, best, worse = 10 * damping, 0.0, 0
        for _ in range(_TRIALS):
            self.lambda_.set(damping)
            c = objective.model(self._directions(objective.gradients), None).minimum(damping)
            objective.place(c)
            found = change(c)
            objective.put_back()
            if found < 1.1 * best:
                good, best, worse = damping, found, 0
            elif found < best / 2 and not worse:
                return
            else:
                worse += 1
                if worse > _BUMP:
                    break
            damping /= 10
        self.lambda_.set(good)

    def _take_best(self, objective: Objective, change: Change | None, interval: int) -> None:
        """Moves the weights to the minimum of the model, and back again if the loss turns out to have risen."""
        gradients, last = objective.gradients, None
        states = [self.state[p] for p in gradients]
        if any(LAST_UPDATE in state for state in states):
            pairs = zip(states, gradients, strict=True)
            last = [state[LAST_UPDATE] if LAST_UPDATE in state else torch.zeros_like(p) for state, p in pairs]
        model = objective.model(self._directions(gradients), last)
        rate = float(rate_of(self.param_groups[0]))
        c = model.minimum(self.lambda_.value) * rate
        if interval == 1 and last is not None:
            self._compare_slopes(float(model.slopes[-1]))
        shown = {"learning_rate": float(c[0]), "momentum": 0.0 if last is None else float(c[-1])}
        actual, predicted = 0.0, model.change(c, self.lambda_.value)
        updates = objective.place(c)
        if change is not None:
            actual = change(c)
            self.lambda_.learn(actual, predicted, interval)
            shown |= {"damping": self.lambda_.value, "reduction_ratio": actual / predicted if predicted else 1.0}
        if actual <= 0:
            if rate >= _TELLING:
                self._secant.expect(float(model.slopes @ c), float(c @ model.curvatures @ c))
            for state, update in zip(states, updates, strict=True):
                state[LAST_UPDATE] = update
        else:
            objective.put_back()
        for group in self.param_groups:
            group.update(shown)

    def _compare_slopes(self, slope: float) -> None:
        """Warns if the curvature of the loss is not the distribution's, for losses whose gradient can't show that."""
        ratio = self._secant.observe(slope)
        # If targets are bounded, too much curvature shows in the targets, which Objective.check() looks at.
        if ratio is None or ratio > 1 and not self._fisher.lacks("target_problem"):
            return
        warn_user(
            f"in the first steps the loss had {ratio:.2g} times the curvature that {self._fisher} predicts: either "
            "the batches are too small for KFAC (use larger ones, or KFACSGD), or the loss has another factor, or "
            "it ignores targets (let the model return only the outputs that the loss uses), or it is a mean over "
            "something other than loss_average: that of nn.CrossEntropyLoss over tokens is "
            "'batch+sequence', of nn.BCEWithLogitsLoss 'elements', and of nn.MSELoss, which is "
            "Gaussian(variance=0.5), 'elements', too"
        )

    def _change_of(self, closure: _Closure, objective: Objective, c: Tensor) -> float:
        """The change of a closure's loss since the start of the step, at the present weights."""
        change = objective.total(closure.change(self._replay.module))
        self.curvature.discard()
        self._replay.discard()
        return change

    def _directions(self, gradients: Mapping[nn.Parameter, Tensor]) -> list[list[Tensor]]:
        """Minus the preconditioned gradient, and minus the gradient of parameters without a preconditioner, if any."""
        found = by_parameter(self.curvature.directions(gradients, 1.0), gradients)
        known = [-found[p] if p in found else torch.zeros_like(g) for p, g in gradients.items()]
        others = [torch.zeros_like(g) if p in found else -g for p, g in gradients.items()]
        return [v for v, some in ((known, found), (others, len(found) < len(gradients))) if some]


def _check_parameters(parameters: Iterable[nn.Parameter]) -> None:
    """Raises TypeError for parameters that are too coarse for small moves, sharded, or have sparse gradients."""
    for p in parameters:
        if p.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"a parameter is {p.dtype}: KFAC needs float32 or float64 weights; autocast is fine")
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise TypeError("a gradient is sparse: KFAC needs dense ones; build embeddings with sparse=False")
        if is_sharded(p):
            raise TypeError(
                "a parameter is sharded (FSDP2, tensor parallelism): KFAC moves the weights to evaluate the model, and "
                "can't do so with shards. Use DistributedDataParallel, or KFACSGD, KFACAdam, KFACAdamW or KFACLAMB"
            )


class _Closure:
    """A closure that can be evaluated again with the same random numbers, which it draws on ``device``."""

    def __init__(self, closure: Callable[[], Any], device: torch.device) -> None:
        self.closure, self.random = closure, RandomState(device)
        self.first: float | None = None

    def __call__(self) -> Any:
        loss = self.closure()
        if not isinstance(loss, Tensor | numbers.Real):  # NumPy's float32 is no float
            raise TypeError(f"step(closure): the closure returned {loss!r}: it must return the loss, after backward()")
        self.first = float(torch.as_tensor(loss, device="cpu").detach())
        return loss

    def change(self, model: nn.Module) -> float:
        """The loss now, minus the loss at the first call; leaves the buffers of the model unchanged."""
        assert self.first is not None
        with repeating(model, self.random), torch.enable_grad():
            return float(torch.as_tensor(self.closure(), device="cpu").detach()) - self.first
