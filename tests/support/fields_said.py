"""What holds of every class of settings, those of the packages beside the core too."""

from __future__ import annotations

from psigrad.config.fields import FREE, LENGTH, RECORDED, flag_of, help_of, settings_of
from psigrad.config.load import flat_names

ON_RESUME = {FREE, RECORDED, LENGTH}


def check(cls) -> None:
    """Its settings are its fields, have flags and help of their own, and say at most one thing of resuming."""
    for name, setting in settings_of(cls).items():
        assert len(setting.marks & ON_RESUME) <= 1, name
        assert help_of(cls, name), name
    assert list(settings_of(cls)) == [name for _, name in flat_names(cls)]
    assert len({flag_of(name) for name in settings_of(cls)}) == len(settings_of(cls))
