"""The labelling page's questions to the server: `psigrad_studio.labels` behind the studio's guard.

Other pages hand two completions over with `Store.send_pair` (Python; `request.app.state.labels` is the store) or POST
/api/label/pair (their script).
"""
