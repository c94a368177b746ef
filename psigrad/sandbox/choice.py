"""Which executor a run gets."""

from __future__ import annotations

from psigrad.sandbox.bubblewrap import Bubblewrap
from psigrad.sandbox.executor import Executor, SandboxError
from psigrad.sandbox.remote import RemoteExecutor
from psigrad.sandbox.tiers import tier_of_this_machine
from psigrad.sandbox.unsafe import Unsafe


def executor_for(url: str = "", *, token: str = "", allow_unsafe_code: bool = False) -> Executor:
    """The service at `url`, else this machine's sandbox, else, only if it is allowed, none at all.

    Raises `SandboxError` where there is no sandbox and `allow_unsafe_code` is off.
    """
    if url:
        return RemoteExecutor(url, token)
    tier = tier_of_this_machine()
    if tier.name != "none":
        return Bubblewrap(tier)
    if allow_unsafe_code:
        return Unsafe()
    raise SandboxError(
        f"There is no sandbox for code on this machine: {tier.why_not} Or set allow_unsafe_code, and the programs that the model "
        "writes run with your rights."
    )
