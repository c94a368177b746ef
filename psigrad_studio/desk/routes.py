"""All routes under /api/label."""

from __future__ import annotations

from fastapi import APIRouter

from psigrad_studio.desk import manage, members, results, sampling, work
from psigrad_studio.desk.store import Store

PREFIX = "/api/label"
IMPORT = f"{PREFIX}/import"


def router(store: Store) -> APIRouter:
    """What the labelling page, and programs with an API token, may ask."""
    routes = APIRouter(prefix=PREFIX)
    for part in (work, manage, members, results, sampling):
        part.add_routes(routes, store)
    return routes
