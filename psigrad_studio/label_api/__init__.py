"""The labelling page's routes, /api/label: `psigrad_studio.labels` behind the studio's guard.

Other pages send two completions with `LabelStore.send_pair` (Python; `request.app.state.labels` is the store) or POST
/api/label/pair (scripts).
"""
