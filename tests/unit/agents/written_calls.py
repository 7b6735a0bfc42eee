"""How each built-in format writes a call of the tools `add` and `search`."""

from __future__ import annotations

import json

TOOLS = {"add": ("a", "b"), "search": ("query",)}
NUMBER = {"type": "integer"}
DECLARED = {
    "add": {"type": "object", "properties": {"a": NUMBER, "b": {}}},
    "search": {"type": "object", "properties": {"query": {"type": "string"}, "limit": NUMBER}},
}


def written(value: object) -> str:
    """A value between tags: text as it is, any other as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def parameters(arguments: dict[str, object], opened: str) -> str:
    return "".join(
        f"<parameter{opened.format(key)}>{written(value)}</parameter>"
        for key, value in arguments.items()
    )


M3 = "]<]minimax[>["


def m3(key: str, value: object) -> str:
    """An argument of MiniMax-M3, or a part of one."""
    inside = written(value)
    if isinstance(value, list | dict):
        parts = value.items() if isinstance(value, dict) else (("item", one) for one in value)
        inside = "".join(m3(name, one) for name, one in parts)
    return f"{M3}<{key}>{inside}{M3}</{key}>"


def gemma(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma, value))}]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


WRITTEN = {
    "hermes": (
        "I add. <tool_call>\n{}\n</tool_call>",
        lambda name, arguments: json.dumps({"name": name, "arguments": arguments}),
    ),
    "llama": (
        "<|python_tag|>{}",
        lambda name, arguments: json.dumps({"name": name, "parameters": arguments}),
    ),
    "deepseek": (
        (
            "I add. "
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        lambda name, arguments: (
            f"function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```"
        ),
    ),
    "glm": (
        "I add. <tool_call>{}\n</tool_call>",
        lambda name, arguments: (
            name
            + "".join(
                f"\n<arg_key>{key}</arg_key>\n<arg_value>{written(value)}</arg_value>"
                for key, value in arguments.items()
            )
        ),
    ),
}
WRITTEN |= {
    "qwen3_coder": (
        "I add.\n<tool_call>\n{}\n</tool_call>",
        lambda name, arguments: f"<function={name}>\n{parameters(arguments, '={}')}</function>",
    ),
    "seed_oss": (
        "I add.\n<seed:tool_call>\n{}\n</seed:tool_call>",
        lambda name, arguments: f"<function={name}>\n{parameters(arguments, '={}')}</function>",
    ),
    "minimax": (
        "I add.\n<minimax:tool_call>\n{}\n</minimax:tool_call>",
        lambda name, arguments: (
            f'<invoke name="{name}">\n' + parameters(arguments, ' name="{}"') + "</invoke>"
        ),
    ),
    "minimax_m3": (
        f"I add.\n{M3}<tool_call>\n{{}}{M3}</tool_call>",
        lambda name, arguments: (
            f"{M3}<invoke "
            f'name="{name}">{"".join(map(m3, arguments, arguments.values()))}{M3}</invoke>\n'
        ),
    ),
    "deepseek_v32": (
        "I add.\n\n<｜DSML｜function_calls>\n{}\n</｜DSML｜function_calls>",
        lambda name, arguments: (
            f'<｜DSML｜invoke name="{name}">\n'
            + "".join(
                (
                    f'<｜DSML｜parameter name="{key}" '
                    f'string="{str(isinstance(value, str)).lower()}">{written(value)}'
                    "</｜DSML｜parameter>\n"
                )
                for key, value in arguments.items()
            )
            + "</｜DSML｜invoke>"
        ),
    ),
    "step3": (
        "I add.<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>{}"
        "<｜tool_call_end｜>\n<｜tool_calls_end｜>",
        lambda name, arguments: (
            f'<steptml:invoke name="{name}">\n'
            + "".join(
                f'<steptml:parameter name="{key}">{written(value)}</steptml:parameter>\n'
                for key, value in arguments.items()
            )
            + "</steptml:invoke>"
        ),
    ),
    "pythonic": (
        "<|python_start|>[{}]<|python_end|>",
        lambda name, arguments: (
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        ),
    ),
    "olmo3": (
        "I add.\n<function_calls>\n{}\n</function_calls>",
        lambda name, arguments: (
            f"{name}({', '.join(f'{key}={json.dumps(value, ensure_ascii=False)}' for key, value in arguments.items())})"
        ),
    ),
    "kimi": (
        "I add.<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
        lambda name, arguments: (
            f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        ),
    ),
    "kimi_k3": (
        (
            "<|open|>response<|sep|>I "
            "add.<|close|>response<|sep|><|open|>tools<|sep|>{}<|close|>tools<|sep|>"
        ),
        lambda name, arguments: (
            f'<|open|>call tool="{name}" index="1"<|sep|>'
            + "".join(
                (
                    f'<|open|>argument key="{key}" '
                    f'type="{"string" if isinstance(value, str) else "any"}"<|sep|>'
                    f"{written(value)}<|close|>argument<|sep|>"
                )
                for key, value in arguments.items()
            )
            + "<|close|>call<|sep|>"
        ),
    ),
    "gemma4": (
        "I add.<|tool_call>{}<tool_call|>",
        lambda name, arguments: f"call:{name}{gemma(arguments)}",
    ),
    "mistral": (
        "[TOOL_CALLS]{}",
        lambda name, arguments: f"{name}[ARGS]{json.dumps(arguments)}",
    ),
    "harmony": (
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant{}",
        lambda name, arguments: (
            f" to=functions.{name}<|channel|>commentary json<|message|>{json.dumps(arguments)}"
        ),
    ),
}
# holds one argument
TAGS = (
    "I search. {}",
    lambda name, arguments: f"<{name}>{next(iter(arguments.values()))}</{name}>",
)
