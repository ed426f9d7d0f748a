"""Bytes and trees that are almost right: what a parser has to refuse is most often one field away from what it takes."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

EDITS = ("flip", "set", "insert", "delete", "cut", "repeat", "zeros")
HOSTILE: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([
        None, True, -1, 0, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1.5, 1e308, "", "x" * 3000, "\ud7ff", b"",
        b"\xff" * 100, [], {}, [[]], "../../etc/passwd", "9" * 400,
    ]),
    st.integers(-(2**63), 2**64 - 1), st.text(max_size=20), st.binary(max_size=20),
    st.recursive(
        st.integers(-3, 3), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner), max_leaves=8
    ),
)  # fmt: skip

NAMES = st.sampled_from(["", "\0", "x" * 5000, "/", "..", "../../../x", "a/b", "machine.json"]) | st.text(max_size=4)


@st.composite
def edited(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        size = draw(st.integers(1, 16))
        match draw(st.sampled_from(EDITS)):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "set" if at < len(data):
                data[at] = draw(st.sampled_from(b'\x00\xff\x7f\x80"{[,:0-9\n'))
            case "insert":
                data[at:at] = draw(st.binary(max_size=16))
            case "delete":
                del data[at : at + size]
            case "cut":
                del data[at:]
            case "repeat":
                data[at:at] = data[max(0, at - 4 * size) : at]
            case "zeros":
                data[at : at + size] = bytes(size)
            case _:
                pass
    return bytes(data)


@st.composite
def changed(draw: st.DrawFn, trees: list[Any]) -> Any:
    """A tree with some of its nodes replaced, removed or doubled."""
    tree = draw(st.sampled_from(trees))
    for _ in range(draw(st.integers(1, 3))):
        tree = _change(draw, tree)
    return tree


def _change(draw: st.DrawFn, node: Any) -> Any:
    if isinstance(node, dict) and node and draw(st.integers(0, 9)) < 8:
        key = draw(st.sampled_from(sorted(node, key=str)))
        match draw(st.sampled_from(["into", "into", "into", "drop", "rename"])):
            case "into":
                return node | {key: _change(draw, node[key])}
            case "drop":
                return {k: v for k, v in node.items() if k != key}
            case _:
                return {draw(NAMES) if k == key else k: v for k, v in node.items()}
    if isinstance(node, list | tuple) and node and draw(st.integers(0, 9)) < 8:
        at = draw(st.integers(0, len(node) - 1))
        match draw(st.sampled_from(["into", "into", "into", "drop", "double"])):
            case "into":
                return [*node[:at], _change(draw, node[at]), *node[at + 1 :]]
            case "drop":
                return [*node[:at], *node[at + 1 :]]
            case _:
                return [*node[:at], node[at], *node[at:]]
    return draw(HOSTILE)
