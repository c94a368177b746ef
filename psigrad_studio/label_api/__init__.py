"""The routes of the labelling page, /api/label, which call `psigrad_studio.labels`.

Two completions are sent to a project by `LabelStore.send_pair` from other pages (`request.app.state.labels` is the store), or by
POST /api/label/pair from scripts.
"""
