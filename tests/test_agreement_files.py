import json
import re
from pathlib import Path

import pytest

from ace_lens.experiments.agreement_files import load_prompts
from ace_lens.experiments.agreement_prompts import AgreementPrompt

SHARED = Path(__file__).parents[2] / "shared/data/agreement"


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        lines = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        path.write_text(lines, encoding="utf-8")
        return path

    return write


def blimp(prefix, good, bad, **more):
    return {"one_prefix_prefix": prefix, "one_prefix_word_good": good, "one_prefix_word_bad": bad} | more


def prefixed(prefix, answer, other, **more):
    return {"clean_prefix": prefix, "patch_prefix": "unread", "clean_answer": answer, "patch_answer": other} | more


def test_blimp(write):
    path = write("pairs.jsonl", [blimp("A café near some parks", "is", "are", UID="distractor")])
    assert load_prompts(path) == [
        AgreementPrompt("A café near some parks", False, "distractor", right=" is", wrong=" are")
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_prefixes_and_answers(write, suffix):
    rows = [prefixed("The roofs ", " leak", " leaks"), prefixed("The roofs", " have", " has", case="plural")]
    assert load_prompts(str(write("pairs" + suffix, rows))) == [
        AgreementPrompt("The roofs", True, right=" leak", wrong=" leaks"),
        AgreementPrompt("The roofs", True, "plural", right=" have", wrong=" has"),
    ]


def test_tables(write):
    numbered = write("a.csv", '\ufeffprompt,number,frame\n"At noon, the roof",singular,fronted\nThe roofs,plural,\n')
    assert load_prompts(numbered) == [
        AgreementPrompt("At noon, the roof", False, "fronted"),
        AgreementPrompt("The roofs", True),
    ]
    answered = write("b.csv", "right,wrong,prompt\nwere,was,The roofs\n")
    assert load_prompts(answered) == [AgreementPrompt("The roofs", True, right=" were", wrong=" was")]
    both = write("c.csv", "prompt,number,right,wrong\nThe roof,singular,leaks,leak\n")
    assert load_prompts(both) == [AgreementPrompt("The roof", False, right=" leaks", wrong=" leak")]


def test_blank_lines_and_a_byte_order_mark_are_passed_over(write):
    line = json.dumps(prefixed("The roof", " is", " are"))
    assert len(load_prompts(write("a.jsonl", f"\ufeff{line}\n\n{line}\n"))) == 2


@pytest.mark.parametrize(
    ("singular", "plural"),
    [
        ("is", "are"),
        ("was", "were"),
        ("is", "were"),
        ("has", "have"),
        ("does", "do"),
        ("isn't", "aren't"),
        ("wasn't", "weren't"),
        ("hasn't", "haven't"),
        ("doesn't", "don't"),
        ("doesn\u2019t", "don\u2019t"),
        ("Goes", "go"),
        ("runs", "run"),
        ("passes", "pass"),
        ("carries", "carry"),
        ("plays", "play"),
        ("looks like", "look like"),
    ],
)
def test_number_is_read_off_the_verbs(write, singular, plural):
    rows = [prefixed("The roof", singular, plural), blimp("The roofs", plural, singular)]
    assert [prompt.plural for prompt in load_prompts(write("a.jsonl", rows))] == [False, True]


@pytest.mark.parametrize(("right", "wrong"), [("is", "was"), ("are", "were"), ("stood", "stand"), ("go", "go")])
def test_verbs_that_do_not_tell_are_refused(write, right, wrong):
    path = write("a.jsonl", [prefixed("The roof", " is", " are"), prefixed("The roof", right, wrong)])
    message = f"{path}, line 2: from ' {right}' and ' {wrong}' the number of the head cannot be read. One has to be"
    with pytest.raises(ValueError, match=re.escape(message)):
        load_prompts(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "The roof", "has the suffix '.txt'. Prompts are read from .jsonl, .json, .csv."),
        ("a.jsonl", "", "a.jsonl holds no prompts."),
        ("a.csv", "prompt,number\n", "a.csv holds no prompts."),
        ("a.jsonl", '\n{"prompt": "The', "line 2 is no JSON (Unterminated string"),
        ("a.json", '[\n{"prompt": 1}]', "line 1 is no JSON (Expecting value"),
        ("a.jsonl", "[1]\n", "line 1 holds a JSON list. Each line has to hold one whole object."),
        ("a.jsonl", [{"text": "The roof"}], "line 1 has no prompt: none of 'one_prefix_prefix', 'clean_prefix', 'pro"),
        ("a.jsonl", [{"clean_prefix": "The roof", "clean_answer": " is"}], "line 1 has no 'patch_answer' among its ke"),
        ("a.csv", "prompt,frame\nThe roof,base\n", "line 2 has no 'right' among its keys ['prompt', 'frame']."),
        ("a.csv", "prompt,number,right\nThe roof,plural,is\n", "line 2 has no 'wrong' among its keys"),
        ("a.jsonl", [prefixed("The roof", 1, " are")], "line 1 has 1 under 'clean_answer', where a text should be."),
        ("a.csv", "prompt,number\n ,plural\n", "line 2 has ' ' under 'prompt', where a text should be."),
        ("a.csv", "prompt,number\nThe roof,one\n", "line 2 gives the number 'one': write singular or plural."),
        (
            "a.csv",
            "prompt,number\nAt noon, the roof,singular\n",
            "line 2 has more fields than the header. A prompt with",
        ),
        ("a.csv", "prompt,number\nThe roof\n", "line 2 has fewer fields than the header."),
        ("a.csv", 'prompt,number\n"The roof"s,plural\n', "line 2 is no CSV ("),
        (
            "a.csv",
            "prompt,number,right,wrong\nThe roof,plural,is,are\n",
            "line 2: the head is plural, but ' is' is given as the right verb.",
        ),
    ],
)
def test_bad_files_are_refused_with_file_and_line(write, name, content, message):
    path = write(name, content)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_prompts(path)
    assert str(error.value).startswith(str(path))


def test_other_encodings_are_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("prompt,number\nThe café,singular\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a\.csv is not text in UTF-8 \(.*\)\. Save it in that encoding"):
        load_prompts(path)


@pytest.mark.skipif(not SHARED.exists(), reason=f"no data by others at {SHARED}")
def test_data_by_others_can_be_read():
    files = sorted(SHARED.glob("*.jsonl"))
    assert len(files) == 3
    for path in files:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        prompts = load_prompts(path)
        assert len(prompts) == len(rows)
        for row, prompt in zip(rows, prompts, strict=True):
            if "case" in row:
                assert row["case"].split("_")[0] == ("plural" if prompt.plural else "singular")
