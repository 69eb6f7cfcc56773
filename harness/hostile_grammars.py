"""Grammars that are slow, or that grow, and regexes with nested counts."""

from hypothesis import strategies as st

NESTED = "((a{1,60}){1,60}){1,60}"

# Harmless by the front end's bounds. The rules and the first regex compile in milliseconds, and each
# token takes longer than the one before it.
CHAIN = (
    "root ::= r0\n"
    + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40))
    + '\nr40 ::= "a" | ""'
)

SLOW = {
    "mask": ({"grammar": CHAIN}, ""),
    "later-mask": ({"regex": "((a+)+)+b|(.{1,15}){1,15}"}, "takes at most 0.1 s for each token"),
    "compile": ({"regex": ".?" * 3000}, "grammar_timeout_s"),
}  # fmt: skip


def regexes() -> st.SearchStrategy[tuple[str, int]]:
    """Regexes, each with the greatest product of its nested counts."""

    def grown(inner):
        count = st.integers(2, 99)
        return st.one_of(
            st.tuples(inner, count).map(lambda one: (f"({one[0][0]}){{1,{one[1]}}}", one[0][1] * one[1])),
            st.tuples(inner, inner).map(lambda one: ("".join(part[0] for part in one), max(part[1] for part in one))),
            inner.map(lambda one: (f"(?:{one[0]})*|[({{]", one[1])),
        )  # fmt: skip

    leaves = st.sampled_from(["a", ".", r"\(", r"\{", "[(]", "[^)]", r"[\]{9}]", '"', ""])
    return st.recursive(leaves.map(lambda text: (text, 1)), grown, max_leaves=8)
