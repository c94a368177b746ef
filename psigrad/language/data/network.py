"""Whether the hub can be asked, for models and datasets."""

from __future__ import annotations

import sys

_network = {"missing": False}


def stay_here_without_a_network() -> None:
    """Use what was downloaded before where the hub's name leads nowhere, as without a network.

    huggingface_hub would ask for every file five times, a minute in all, before it looks at what is there.
    """
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    if (constants.HF_HUB_OFFLINE and not _network["missing"]) or {"http", "https", "all"} & getproxies().keys():
        return  # asked for by the user; or the proxy knows the name
    hub = urlsplit(constants.ENDPOINT).hostname or ""
    try:
        socket.getaddrinfo(hub, None)
        _network["missing"] = False
    except OSError:
        if not _network["missing"]:
            print(f"psigrad: No network: {hub} has no address here. What was downloaded before is used.", file=sys.stderr)
        _network["missing"] = True
    constants.HF_HUB_OFFLINE = _network["missing"]
