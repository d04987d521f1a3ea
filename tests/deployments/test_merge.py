"""The merge of a deployment's settings: what changed in the file arrives, everything else stays."""

from hypothesis import given
from hypothesis import strategies as st

from deployments.merge import ABSENT, Difference, find_differences, hash_value, is_hashed, merge

scalars = st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from([0.5, 1.0, "", "a"])
leaves = (
    scalars | st.lists(scalars, max_size=2) | st.lists(st.dictionaries(st.just("k"), scalars), max_size=2)
)
keys = st.sampled_from("abc")
objects = st.recursive(
    st.dictionaries(keys, leaves, max_size=3),
    lambda inner: st.dictionaries(keys, leaves | inner, max_size=3),
    max_leaves=8,
)
FILE = {"parameters": {"model": "small", "datasets": ["a", "b"], "budget": 100}}


def same(one, other):
    return hash_value(one) == hash_value(other)


@given(file=objects, there=objects)
def test_an_unchanged_file_changes_nothing(file, there):
    """Whatever was edited, added or removed on the server."""
    assert same(merge(hash_value(file), there, file), there)


@given(before=objects, file=objects)
def test_a_change_of_the_file_arrives_where_nobody_edited(before, file):
    """What the file removed is gone too."""
    assert same(merge(hash_value(before), before, file), file)


@given(before=objects, there=objects, file=objects)
def test_merged_twice_is_merged_once(before, there, file):
    """A serving process that starts again changes nothing."""
    once = merge(hash_value(before), there, file)
    assert same(merge(hash_value(file), once, file), once)


@given(
    before=st.dictionaries(keys, leaves),
    there=st.dictionaries(keys, leaves),
    file=st.dictionaries(keys, leaves),
)
def test_each_key_has_its_own_origin(before, there, file):
    """The file's where the file changed the key, the server's elsewhere."""
    merged = merge(hash_value(before), there, file)
    for key in "abc":
        changed = not same(before.get(key, ABSENT), file.get(key, ABSENT))
        origin = file if changed else there
        assert same(merged.get(key, ABSENT), origin.get(key, ABSENT))


@given(value=objects)
def test_what_was_hashed_is_recognized(value):
    """At any depth, the empty one too."""
    assert is_hashed(hash_value(value))


@given(value=leaves)
def test_what_is_damaged_is_recognized(value):
    """No value of a file looks like its hash."""
    assert not is_hashed(value)
    assert not is_hashed({"a": {"b": value}})


def test_an_edit_and_a_change_of_the_file_beside_it_both_stay():
    """The operator raised the budget; the file has another model and one dataset less."""
    there = {"parameters": {**FILE["parameters"], "budget": 500, "note": "mine"}}
    file = {"parameters": {"model": "big", "datasets": ["a"], "budget": 100}}
    assert merge(hash_value(FILE), there, file) == {
        "parameters": {"model": "big", "datasets": ["a"], "budget": 500, "note": "mine"}
    }


def test_what_was_removed_on_the_server_comes_back_only_changed():
    """Removed, it stays so while the file says what it said."""
    there = {"parameters": {"model": "small", "datasets": ["a", "b"]}}
    assert merge(hash_value(FILE), there, FILE) == there
    file = {"parameters": {**FILE["parameters"], "budget": 200}}
    assert merge(hash_value(FILE), there, file) == file


def test_where_both_changed_the_file_wins():
    """The same key, to different values."""
    assert merge(hash_value({"a": 1}), {"a": 2}, {"a": 3}) == {"a": 3}


def test_true_is_not_one():
    """Python says they are equal; a flow does not."""
    assert merge(hash_value({"a": 1}), {"a": 1}, {"a": True})["a"] is True
    assert list(find_differences({"a": 1}, {"a": True})) == [Difference("a", 1, True)]


def test_differences_have_their_path():
    """Down to the key, and a list as a whole; what is absent is told from null."""
    before = {"p": {"x": 1, "list": [1, 2], "gone": None}, "tags": []}
    after = {"p": {"x": 2, "list": [1], "new": 0}, "tags": []}
    assert list(find_differences(before, after)) == [
        Difference("p.x", 1, 2),
        Difference("p.list", [1, 2], [1]),
        Difference("p.gone", None, ABSENT),
        Difference("p.new", ABSENT, 0),
    ]
