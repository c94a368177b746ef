"""The router that joins all routes under /api/label."""

from __future__ import annotations

from fastapi import APIRouter

from psigrad_studio.label_api import member_routes, project_routes, result_routes, sample_routes, task_routes
from psigrad_studio.label_api.store import LabelStore

PREFIX = "/api/label"
IMPORT = f"{PREFIX}/import"


def router(store: LabelStore) -> APIRouter:
    """Return the routes for the labelling page and for programs with an API token."""
    routes = APIRouter(prefix=PREFIX)
    for part in (task_routes, project_routes, member_routes, result_routes, sample_routes):
        part.add_routes(routes, store)
    return routes
