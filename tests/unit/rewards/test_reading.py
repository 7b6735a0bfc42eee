"""The split of a response into thinking and answer."""

import pytest

from hybridflow.rewards.reading import (
    Box,
    Reading,
    boxed,
    fenced_blocks,
    last_box,
    last_section,
    opens_thinking,
    read_response,
)

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
START = "<|start|>assistant"


@pytest.mark.parametrize(
    ("text", "thinking_open", "thinking", "answer", "closed"),
    [
        ("4", False, "", "4", True),
        ("", True, "", "", False),
        ("<think>a</think>b", False, "a", "b", True),
        ("<think>\na\n</think>\n\nb", False, "a", "\n\nb", True),
        ("a</think>\n<answer>b</answer>", True, "a", "\n<answer>b</answer>", True),
        # the prompt is not known
        ("a</think><answer>b</answer>", False, "a", "<answer>b</answer>", True),
        ("a, b </think> c", True, "a, b", " c", True),
        ("<think>a</think>b", True, "a", "b", True),  # the model repeats the prompt's marker
        ("<think>maybe \\boxed{42} but", False, "maybe \\boxed{42} but", "", False),
        ("maybe \\boxed{42} but", True, "maybe \\boxed{42} but", "", False),
        ("Well. <think>maybe", False, "Well. maybe", "", False),
        ("<think>a</think>1\n<think>b</think>2", False, "a1\nb", "2", True),
        ("<think>a</think>1\n<think>b", False, "a1\nb", "", False),
        (
            "<think>a</think>the <think> tag and </think>",
            False,
            "a",
            "the <think> tag and </think>",
            True,
        ),
        (
            '{"content": "end with </think> please"}',
            False,
            "",
            '{"content": "end with </think> please"}',
            True,
        ),
        ('{"content": "write <think> here"}', False, "", '{"content": "write <think> here"}', True),
        ("<think>a <think>b</think>c", False, "a <think>b", "c", True),
        ("[THINK]a </think> b[/THINK]c", False, "a </think> b", "c", True),
        ("◁think▷a◁/think▷b", False, "a", "b", True),
        ("<mm:think>a</mm:think>b", False, "a", "b", True),
        ("<|open|>think<|sep|>a<|close|>think<|sep|>b", False, "a", "b", True),
        ("<|channel>thought\na<channel|>b", False, "a", "b", True),
        ("<thought>a</thought>b", False, "a", "b", True),
        (f"{ANALYSIS}maybe \\boxed{{42}} but", False, "maybe \\boxed{42} but", "", False),
        (f"{ANALYSIS}a<|end|>{START}{FINAL}b", False, "a", "b", True),
        (f"{ANALYSIS}a<|end|>{START}{ANALYSIS}b", False, "ab", "", False),
        (f"{FINAL}b", False, "", "b", True),
        (f"<|channel|>commentary<|message|>a<|end|>{START}{FINAL}b", False, "", "b", True),
        (f"in gpt-oss {ANALYSIS}begins", False, "", f"in gpt-oss {ANALYSIS}begins", True),
    ],
)
def test_thinking_and_answer(text, thinking_open, thinking, answer, closed):
    assert read_response(text, thinking_open) == Reading(thinking, answer, closed)


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|Assistant|><think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("Start with <think>.<|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_a_prompt_that_opens_the_thinking(prompt, opened):
    assert opens_thinking(prompt) is opened


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{42}. wait \boxed{17", None),
        (r"\boxed{", None),
        (r"so \boxed{\frac{1}{2}} and $\boxed{3}$", r"\frac{1}{2}, 3"),
        (r"First \boxed{3}, but that is wrong: \boxed{7}", "7"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed{4} \boxed{4}", "4"),
    ],
)
def test_the_last_box(text, content):
    box = last_box(text)
    assert box is not None and box.content == content


def test_no_box():
    assert last_box("no box {here}") is None and last_box(boxed("7")) == Box("7", 0)


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("```python\nx\n```\nand\n```\ny\n```", [("python", "x", True), ("", "y", True)]),
        ("```Python\r\nx\r\n```", [("python", "x", True)]),
        ("  ```py\n  x\n    y\n  ```", [("py", "x\n  y", True)]),
        ("Code: ~~~python\nx~~~", [("python", "x", True)]),
        ("```python\nx", [("python", "x", False)]),
        ("a ```x``` b", []),
    ],
)
def test_fenced_blocks(text, blocks):
    assert [(block.label, block.text, block.closed) for block in fenced_blocks(text)] == blocks


def test_a_block_may_have_a_fence_inside():
    (block, *_) = fenced_blocks("```python\ns = '''\n```\n'''\n```")
    assert (block.text, block.longer) == ("s = '''", ("s = '''\n```\n'''",))


def test_the_last_section():
    assert last_section("<answer>a</answer><answer> b </answer>", "answer") == " b "
    assert (
        last_section("<answer>a</answer><answer>b", "answer") is None
        and last_section("a", "answer") is None
    )
