"""A grammar's answers depend on the path alone, whatever was asked before; drafts that break it are cut."""

import copy
import json
import resource

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from yggdrasil.acceptance import grammar as grammar_module
from yggdrasil.acceptance.sampling import Constraint
from yggdrasil.artifacts.fork import CAN_FORK
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.drafters.grammar import prune_forbidden
from yggdrasil.errors import YggdrasilError
from yggdrasil.scheduling.plan import resolve_source
from yggdrasil.tree.token_tree import TokenTree

pytest.importorskip("llguidance")
from yggdrasil.acceptance.grammar import GrammarCompiler, control_tokens

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOKENIZER = load_tokenizer(resolve_source("yggdrasil:assets/tiny/target"))
VOCAB = len(TOKENIZER) + 3  # a padded model
COMPILER = GrammarCompiler(TOKENIZER, VOCAB, [TOKENIZER.eos_token_id])
JSON_SCHEMA = Constraint("json_schema", json.dumps(SCHEMA))


def tokens(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


GOOD = [*tokens('{"name": "Ada", "age": 36}'), TOKENIZER.eos_token_id]


def test_a_matching_text_is_allowed_and_ends():
    grammar = COMPILER.compile(JSON_SCHEMA)

    assert grammar.allows(GOOD)
    assert not grammar.mask(GOOD, VOCAB).any()
    assert grammar.mask(GOOD[:-1], VOCAB).nonzero().flatten().tolist() == [TOKENIZER.eos_token_id]
    assert not grammar.allows([*GOOD, 5])
    assert not grammar.allows([TOKENIZER.eos_token_id])
    assert grammar.allows(GOOD[:4])
    assert TOKENIZER.decode(grammar.forced(tokens('{"na'))).startswith("me")


def test_json_is_spaced_as_the_model_likes_but_not_for_ever_unless_the_schema_says_otherwise():
    compact = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    fixed = Constraint("json_schema", json.dumps({**SCHEMA, "x-guidance": compact}))
    free = COMPILER.compile(JSON_SCHEMA)

    for text in ('{"name": "Ada", "age": 36}', '{\n  "name": "Ada",\n  "age": 36\n}', '{"name":"Ada","age":36}'):
        assert free.allows(tokens(text))
    for text in ('{  "name"', '{\n\n"name"', "{\n" + " " * 17):
        assert not free.allows(tokens(text))
    assert COMPILER.compile(fixed).allows(tokens('{"name":"Ada","age":36}'))
    assert not COMPILER.compile(fixed).allows(tokens('{"name": "Ada"'))


@examples(12)
@given(st.lists(st.tuples(st.integers(0, len(GOOD)), st.lists(st.integers(0, VOCAB - 1), max_size=2)), max_size=6))
def test_answers_do_not_depend_on_what_was_asked_before(questions):
    used = COMPILER.compile(JSON_SCHEMA)
    for length, wrong in questions:
        path = [*GOOD[:length], *wrong]
        fresh = COMPILER.compile(JSON_SCHEMA)

        assert used.allows(path) == fresh.allows(path)
        assert torch.equal(used.mask(path, VOCAB), COMPILER.compile(JSON_SCHEMA).mask(path, VOCAB))


def test_every_masked_token_and_no_other_extends_the_path():
    grammar = COMPILER.compile(Constraint("regex", "(ab|c)+"))
    mask = grammar.mask(tokens("ab"), VOCAB)

    assert {t for t in range(VOCAB) if grammar.allows([*tokens("ab"), t])} == set(mask.nonzero().flatten().tolist())


def test_forbidden_branches_are_cut_whole():
    grammar, tree = COMPILER.compile(JSON_SCHEMA), TokenTree.allocate(16, 2, torch.device("cpu"))
    tree.plant(1)
    right = [0]
    for token in GOOD[:3]:
        wrong = tree.attach(right[-1], tokens("%")[0], -0.1)
        tree.attach(wrong, GOOD[0], -0.1)
        right.append(tree.attach(right[-1], token, -0.5))

    assert prune_forbidden(tree, grammar, []) == 6
    assert torch.isfinite(tree.scores).nonzero().flatten().tolist() == right


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("regex", "(a"),
        Constraint("json_schema", '{"type": "nothing"}'),
        Constraint("json_schema", "{"),
        Constraint("json_schema", "[1]"),
        Constraint("grammar", "start: missing"),
    ],
    ids=str,
)
def test_constraints_that_are_not_valid(constraint):
    with pytest.raises(YggdrasilError, match=f"the {constraint.kind} is not valid"):
        COMPILER.compile(constraint)


@pytest.mark.parametrize(("text", "reason"), [("[", "unclosed character class"), ("a\\", "ends with a backslash")])
def test_the_reason_is_said_of_an_expression_that_is_not_valid(text, reason):
    with pytest.raises(YggdrasilError, match=f"the regex is not valid: .*{reason}"):
        COMPILER.compile(Constraint("regex", text))


def test_a_backslash_that_is_escaped_may_come_last():
    assert COMPILER.compile(Constraint("regex", r"a\\")).allows(tokens("a\\"))


def test_a_constraint_that_outgrows_its_bounds_is_named():
    """A matcher in error has stopped: it looked as if nothing were allowed any more."""
    grammar = COMPILER.compile(Constraint("regex", "a{300000}"))
    path = tokens("a")
    with pytest.raises(YggdrasilError, match=r"the constraint could not be followed: .*too many"):  # noqa: PT012
        for _ in range(40):
            grammar.mask(path, VOCAB)
            path += tokens("a")


@pytest.mark.parametrize(
    "constraint", [Constraint("regex", r"[^\s\S]"), Constraint("grammar", "start: start")], ids=["regex", "grammar"]
)
def test_what_nothing_can_match_is_said_to_be(constraint):
    with pytest.raises(YggdrasilError, match="no token may come next, so no text that begins like this"):
        COMPILER.compile(constraint).mask([], VOCAB)


def test_the_schema_true_takes_any_json_and_false_none():
    for schema in (True, {}):
        grammar = COMPILER.compile(Constraint("json_schema", schema))
        assert grammar.allows(tokens("[1, null]"))
        assert not grammar.allows(tokens("yes"))
    with pytest.raises(YggdrasilError, match="the json_schema is not valid: false allows nothing"):
        COMPILER.compile(Constraint("json_schema", False))


@pytest.mark.parametrize("text", ['start: "yes" | "no"', 'root ::= "yes" | "no"'], ids=["Lark", "GBNF"])
def test_grammars_of_both_notations(text):
    grammar = COMPILER.compile(Constraint("grammar", text))

    assert grammar.allows(tokens("yes"))
    assert not grammar.allows(tokens("maybe"))


def test_a_model_without_an_end_token():
    with pytest.raises(YggdrasilError, match="a constraint needs an end-of-text token"):
        GrammarCompiler(TOKENIZER, VOCAB, [])


def schema(value):
    return Constraint("json_schema", json.dumps(value))


def nested(depth):
    inner = {"type": "string"}
    for _ in range(depth):
        inner = {"type": "object", "properties": {"x": inner}, "required": ["x"]}
    return inner


TREE = {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}
OVERLAPPING = [
    {"anyOf": [{"type": "string", "pattern": f"a{i}.*"}, {"type": "integer", "minimum": i}]} for i in range(30)
]
HARD = {
    "schema, exponential": schema({"allOf": OVERLAPPING}),
    "schema, deep": schema(nested(60)),
    "schema, too deep": schema(nested(400)),
    "schema, recursive": schema({"$defs": {"t": TREE}, "$ref": "#/$defs/t"}),
    "schema, huge counts": schema(
        {"type": "array", "items": {"type": "integer"}, "minItems": 99999, "maxItems": 100000}
    ),
    "schema, huge texts": schema({"type": "string", "maxLength": 1_000_000}),
    "schema, wide": schema({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(500)}}),
    "regex, exponential": Constraint("regex", "(a|b)*a(a|b){20}"),
    "regex, deep": Constraint("regex", "(" * 40 + "a" + ")*" * 40),
    "regex, huge counts": Constraint("regex", "(a{1,1000}){1,1000}"),
    "regex, wide": Constraint("regex", "|".join(f"word{i}" for i in range(3000))),
    "grammar, deep": Constraint(
        "grammar", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(300)) + 'r300: "a"'
    ),
    "grammar, recursive": Constraint("grammar", 'start: "(" start ")" | start start | "a"'),
    "grammar, exponential": Constraint("grammar", "start: A\nA: /(a|b)*a(a|b){20}/"),
    "grammar, wide": Constraint("grammar", "start: " + " | ".join(f'"word{i}"' for i in range(3000))),
    "grammar, huge counts": Constraint("grammar", 'start: "a"{1,1000000}'),
}


@pytest.mark.skipif(not CAN_FORK, reason="limits need a process of its own")
@pytest.mark.parametrize("name", HARD)
def test_no_constraint_takes_more_than_its_limits(name, monkeypatch):
    """It is compiled within the limits or refused in a sentence; this process grows by little."""
    monkeypatch.setattr(grammar_module, "_CPU_SECONDS", 2)
    before = resource.getrusage(resource.RUSAGE_SELF)
    if name == "schema, exponential":
        with pytest.raises(YggdrasilError, match=r"^the json_schema is too complex: compiling it takes"):
            COMPILER.compile(HARD[name])
    elif name == "schema, too deep":
        with pytest.raises(YggdrasilError, match=r"^the json_schema is not valid: recursion limit"):
            COMPILER.compile(HARD[name])
    else:
        assert COMPILER.compile(HARD[name]).mask([], VOCAB).any()
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 2.5
    assert after.ru_maxrss - before.ru_maxrss < 300 << 10


def test_a_wide_enumeration_is_right():
    words = [f"word{i * 7919 % 100003}" for i in range(8000)]
    grammar = COMPILER.compile(schema({"enum": words}))

    assert all(grammar.allows([*tokens(json.dumps(word)), TOKENIZER.eos_token_id]) for word in words[::500])
    assert not grammar.allows([*tokens('"word"'), TOKENIZER.eos_token_id])


@pytest.mark.parametrize("is_in_vocabulary", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda text: Constraint("regex", f"{text} ok"),
        lambda text: schema({"const": text}),
        lambda text: Constraint("grammar", f'start: "{text}"'),
    ],
)
def test_the_text_of_an_added_token_can_be_written(make, is_in_vocabulary):
    """As Qwen's ``<tool_call>``, which lies behind the vocabulary, and Gemma's ``<b>``, which is part of it."""
    tokenizer = copy.deepcopy(TOKENIZER.whole)
    text = next(token for token in tokenizer.get_vocab() if token.isalpha() and len(token) > 3)
    text = text if is_in_vocabulary else "<tool_call>"
    tokenizer.add_tokens([AddedToken(text, special=False)])
    grammar = GrammarCompiler(tokenizer, len(tokenizer) + 3, [tokenizer.eos_token_id]).compile(make(text))

    path = []
    while not (mask := grammar.mask(path, len(tokenizer)))[tokenizer.eos_token_id]:
        token = int(mask.nonzero()[0])
        assert grammar.allows([*path, token])
        path.append(token)
    assert text in tokenizer.decode(path)
    assert control_tokens(tokenizer).keys() >= {tokenizer.eos_token}
    assert (text in control_tokens(tokenizer)) == (not is_in_vocabulary)
