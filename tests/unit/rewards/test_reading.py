"""The split of a response into thinking and answer."""

import pytest

from hybridflow.rewards.reading import Reading, opens_thinking, read_response


@pytest.mark.parametrize(
    ("text", "thinking_open", "thinking", "answer", "closed"),
    [
        ("4", False, "", "4", True),
        ("", True, "", "", False),
        ("<think>a</think>b", False, "a", "b", True),
        ("<think>\na\n</think>\n\nb", False, "a", "\n\nb", True),
        ("a</think>\n<answer>b</answer>", True, "a", "\n<answer>b</answer>", True),
        ("a</think><answer>b</answer>", False, "a", "<answer>b</answer>", True),  # the prompt is not known
        ("a, b </think> c", True, "a, b", " c", True),
        ("<think>a</think>b", True, "a", "b", True),  # the model repeats the prompt's marker
        ("<think>maybe \\boxed{42} but", False, "maybe \\boxed{42} but", "", False),
        ("maybe \\boxed{42} but", True, "maybe \\boxed{42} but", "", False),
        ("Well. <think>maybe", False, "Well. maybe", "", False),
        ("<think>a</think>1\n<think>b</think>2", False, "a1\nb", "2", True),
        ("<think>a</think>1\n<think>b", False, "a1\nb", "", False),
        ("<think>a</think>the <think> tag and </think>", False, "a", "the <think> tag and </think>", True),
        ('{"content": "end with </think> please"}', False, "", '{"content": "end with </think> please"}', True),
        ("<think>a <think>b</think>c", False, "a <think>b", "c", True),
        ("[THINK]a </think> b[/THINK]c", False, "a </think> b", "c", True),
        ("◁think▷a◁/think▷b", False, "a", "b", True),
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
