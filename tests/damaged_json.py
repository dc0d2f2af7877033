"""Bodies of HTTP answers with random damage: values replaced, removed, reversed or repeated, and texts cut off."""

from __future__ import annotations

import copy
from typing import Any

import orjson
from hypothesis import strategies as st

# Lists and dicts are new ones each time: a later change may reach into them.
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.integers(-2, 9), st.floats(),
    st.sampled_from(["", "0", "7", "abort", "٣", "9" * 40, "nan"]),
    st.builds(list), st.builds(dict), st.builds(lambda: [1, 2]),
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [inner for key, child in items for inner in [(*path, key), *places(child, (*path, key))]]


@st.composite
def damaged(draw: st.DrawFn, whole: Any) -> bytes:
    """The body of the answer `whole` after up to three changes; one in ten is cut off as well."""
    body: Any = copy.deepcopy(whole)
    for _ in range(draw(st.integers(0, 3))):
        if not (paths := places(body)):
            break
        *parents, key = draw(st.sampled_from(paths))
        parent = body
        for step in parents:
            parent = parent[step]
        change = draw(st.sampled_from(["replace", "replace", "remove", "reverse", "repeat"]))
        if change == "replace":
            parent[key] = draw(VALUES)
        elif change == "remove":
            del parent[key]
        elif isinstance(parent, list):
            parent[:] = parent[::-1] if change == "reverse" else [*parent, parent[key]]
    text = orjson.dumps(body, option=orjson.OPT_INDENT_2 if draw(st.booleans()) else None)
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 9)) == 0 else text
