"""HTTP route ``POST /ext/swap/priority``: sets the priority of a request that waits or runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.requests import present
from sgl_ext.engine.core.sglang_types import Scheduler, TokenizerManager
from sgl_ext.engine.swap.priorities import LEAST, MOST, give_to
from sgl_ext.errors import ExtError

if TYPE_CHECKING:
    from fastapi import FastAPI

_KEY = "sgl_ext.priority/"
"""Prefix of the setting that carries a priority to the schedulers; the request's id follows."""


class UnknownRequestError(ExtError):
    """Error for an id that no waiting or running request has."""

    status = 404


class GivePriority(BaseModel):
    """Body of ``POST /ext/swap/priority``."""

    model_config = ConfigDict(extra="forbid")

    rid: Annotated[str, Field(min_length=1, max_length=1000)]
    """The request's ``rid``, or the ``id`` of its answer. For several answers (``n`` > 1), the
    ``id`` of one of them, as SGLang gives each a ``rid`` of its own."""
    priority: Annotated[StrictInt, Field(ge=LEAST, le=MOST)]
    """Priority; larger is more urgent, unless ``--schedule-low-priority-values-first`` is set."""


def install(app: FastAPI, manager: TokenizerManager, useless: str | None) -> None:
    """Adds the route to SGLang's HTTP server before the server starts.

    Args:
        useless: reason why priorities have no effect; None if they have one.
    """
    from fastapi import APIRouter
    from sglang.srt.managers.io_struct import SetInternalStateReq
    from sglang.srt.utils.auth import AuthLevel, auth_level

    from sgl_ext.engine.front.routes import ExtRoute, add_routes

    routes = APIRouter(route_class=ExtRoute)

    @routes.post("/ext/swap/priority")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
    async def give(body: GivePriority) -> dict[str, object]:
        if useless is not None:
            raise ExtError(useless)
        asked = SetInternalStateReq(server_args={_KEY + body.rid: body.priority})
        if not any(await manager.set_internal_state(asked)):
            raise UnknownRequestError(
                f"no request {body.rid!r} is waiting or running; it may have been answered, or it "
                "may have several answers (n > 1): give the id of each of these"
            )
        return {"rid": body.rid, "priority": body.priority}

    add_routes(app, routes)


def useless(policy: str, by_priority: bool) -> str | None:
    """Returns the reason why priorities have no effect under ``swap.policy``; None if they do.

    Args:
        by_priority: whether SGLang schedules by priority.
    """
    counts = "priorities take effect with swap.policy static"
    if policy == "sglang" and not by_priority:
        return (
            "swap.policy is sglang without --enable-priority-scheduling, so priorities have no "
            f"effect; {counts}, or with that option"
        )
    if policy not in ("sglang", "static"):
        return f"swap.policy is {policy}, which decides itself which requests run; {counts}"
    return None


def _set(original: Original, state: Any, request: Any) -> object:
    """Sets priorities in the scheduler; other settings go to SGLang's method."""
    asked = {
        key.removeprefix(_KEY): value
        for key, value in request.server_args.items()
        if key.startswith(_KEY)
    }
    if not asked:
        return original(state, request)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    # SGLang's own route takes any number, such as NaN, and has no bounds.
    valid = all(isinstance(value, int) and LEAST <= value <= MOST for value in asked.values())
    done = [valid and _give(state.scheduler, rid, priority) for rid, priority in asked.items()]
    return SetInternalStateReqOutput(updated=all(done))


def _give(scheduler: Scheduler, rid: str, priority: int) -> bool:
    ext = runtime.current
    if ext is None or ext.swap is None:
        return False
    priorities = ext.swap.priorities
    if priorities is not None and priorities.give(rid, priority):
        return True
    named = [req for req in present(scheduler, scheduler.running_batch) if req.rid == rid]
    for req in named:
        give_to(req, priority)
    return bool(named)


HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler_components.internal_state."
        "SchedulerInternalStateController.set_internal_state",
        "around",
        _set,
        "SGLang's schedulers accept a fixed set of messages",
    ),
)
