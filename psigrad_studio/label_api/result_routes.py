"""The routes for results and exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from psigrad_studio.json_api import json_response
from psigrad_studio.label_api.store import LabelStore
from psigrad_studio.labels import export, projects
from psigrad_studio.labels.export import Exported
from psigrad_studio.labels.people import Person
from psigrad_studio.labels.refusals import Refusal

ProjectQuery = Annotated[int, Query(ge=1, lt=2**63)]
Aspect = Annotated[str, Query(max_length=60)]
By = Literal["sampler", "run", "step", "completion"]
MOST_PLACES = 200
"""The maximum number of lines of a ranking that are sent, since a ranking may have a line for each completion."""


def add_routes(routes: APIRouter, store: LabelStore) -> None:
    """Add the routes for results and exports."""

    @routes.get("/results")
    def said(request: Request, project: ProjectQuery, by: By = "sampler", aspect: Aspect = "") -> Response:
        from psigrad_studio.labels import results

        db, person = store.db, store.asking(request)
        with store.slowly():
            on = results.by_aspect(db, person, project)
            return json_response(
                {
                    "progress": projects.progress(db, person, project),
                    "agreement": on.get(aspect) or (results.agreement(db, person, project, aspect) if on else None),
                    "aspects": {
                        name: {"percent": one.percent, "alpha": one.alpha, "shared": one.shared} for name, one in on.items()
                    },
                    "ranking": _ranking(store, person, project, by, aspect),
                }
            )

    @routes.get("/left-out")
    def left_out(request: Request, project: ProjectQuery, votes: export.Votes = "majority", aspect: Aspect = "") -> Response:
        db, person = store.db, store.asking(request)
        with store.slowly():
            made = {form: make(db, person, project, votes, aspect=aspect) for form, make in FORMS.items()}
        return json_response({form: {"rows": len(each.rows), "left_out": each.left_out} for form, each in made.items()})

    @routes.get("/export")
    def exported(
        request: Request,
        project: ProjectQuery,
        form: Literal["preference", "unpaired", "votes"] = "preference",
        votes: export.Votes = "majority",
        margin: bool = False,
        aspect: Aspect = "",
    ) -> Response:
        person = store.asking(request)
        with store.slowly():
            name = projects.info(store.db, person, project).settings.name
            made = _made(store, person, project, form, votes, margin, aspect)
        return _file("-".join(filter(None, (name, aspect, form))), made.rows, made.left_out)


FORMS = {"preference": export.preference, "unpaired": export.unpaired}


def _made(store: LabelStore, person: Person, project: int, form: str, votes: export.Votes, margin: bool, aspect: str) -> Exported:
    if form == "votes":
        return Exported(export.dump(store.db, person, project))
    if form == "unpaired":
        return export.unpaired(store.db, person, project, votes, aspect=aspect)
    return export.preference(store.db, person, project, votes, margin=margin, aspect=aspect)


def _ranking(store: LabelStore, person: Person, project: int, by: By, aspect: str) -> dict[str, Any]:
    """Return the ranking for JSON, or a mapping with the reason why there is none."""
    from psigrad_studio.labels import results

    try:
        table = results.ranking(store.db, person, project, by, aspect)
    except Refusal as error:
        return {"why": str(error)}
    return {**vars(table), "places": table.places[:MOST_PLACES], "competitors": len(table.places)}


def _file(name: str, rows: Iterable[Mapping[str, Any]], left_out: Mapping[str, int]) -> Response:
    """Return rows as a JSONL download. A header counts the skipped rows by reason."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "labels"
    headers = {"content-disposition": f'attachment; filename="{safe}.jsonl"', "x-psigrad-left-out": json.dumps(dict(left_out))}
    return Response("".join(export.lines(rows)), media_type="application/x-ndjson", headers=headers)
