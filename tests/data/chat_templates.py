"""Shortened chat templates of well-known models, each with its control tokens."""

from dataclasses import dataclass

from transformers import AddedToken, PreTrainedTokenizerFast

from tests.other_tokenizers import bpe_tokenizer

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools>\n\nCall them within <tool_call></tool_call>.<|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and not(message.content.startswith('<tool_response>')
           and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}{%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
LLAMA3 = r"""
{{- bos_token }}
{%- set user = none %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n" + system + "<|eot_id|>" }}
{%- if tools %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nGiven the following functions, respond with JSON.\n\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
    {{- messages[0]['content'] | trim + "<|eot_id|>" }}{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' + message.content }}
            {{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson }}
            {{- "}<|eot_id|>" }}
        {%- endfor %}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" + {"output": message.content} | tojson + "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
HERMES = r"""
{%- macro kind(spec) %}
    {%- set known = {"string": "str", "number": "float", "integer": "int"} %}
    {%- if known[spec.type] is defined %}{{- known[spec.type] }}{%- else %}{{- "Any" }}{%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- if tools %}
    {{- "<|im_start|>system\nHere are the available tools: <tools> " }}
    {%- for tool in tools %}
        {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
        {{- '{"name": "' + tool.name + '", "description": "' + tool.name + '(' }}
        {%- for name, fields in tool.parameters.properties | items %}
            {{- name + ": " + kind(fields) }}{%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
        {{- ") - " + tool.description + '\n\n", "parameters": ' + tool.parameters | tojson + '}\n' }}
    {%- endfor %}
    {{- " </tools><|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>assistant\n' + message.content }}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n{"arguments": ' + call.function.arguments | tojson }}
            {{- ', "name": "' + call.function.name + '"}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>tool\n<tool_response>\n{"name": "' + message.name + '", "content": ' }}
        {{- message.content | tojson + '}\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
GEMMA = r"""
{{- bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\n\n' -%}{%- set messages = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""
R1 = r"""
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{%- set ns.system = ns.system + message['content'] %}{%- endif %}
{%- endfor %}
{{- bos_token }}{{- ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}
"""
# Tokens that mark turns are made of the roles' names; tools are written as tags made of what they are called (as in
# Qwen3-Coder).
TAGS = r"""
{%- for tool in tools or [] %}
    {%- for name, fields in tool.function.parameters.properties | items %}
        {{- '\n<' ~ name ~ '>' ~ fields.type ~ '</' ~ name ~ '>' }}
    {%- endfor %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>\n' }}
    {%- if message.content is string %}{{- message.content }}{%- else %}
        {%- for part in message.content %}{{- part.text }}{%- endfor %}
    {%- endif %}
    {{- '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}
"""


@dataclass
class Family:
    """A template, the special tokens, of which the first begins a text, and added tokens that aren't special."""

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    tools: bool = False

    def tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = bpe_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": list(self.special)})
        tokenizer.bos_token = self.special[0]
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in self.added])
        tokenizer.chat_template = self.template
        return tokenizer


_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
_TAGGED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
FAMILIES = {
    "SmolLM2": Family(SMOLLM2, CHATML),
    "Qwen3": Family(QWEN3, CHATML, _TAGGED, tools=True),
    "Llama 3": Family(LLAMA3, _LLAMA, tools=True),
    "Hermes": Family(HERMES, CHATML, _TAGGED[2:], tools=True),
    "Gemma": Family(GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>"), ("\n\n", "<h1>")),
    "R1": Family(
        R1, ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"), ("<｜User｜>", "<｜Assistant｜>", *_TAGGED[:2])
    ),
    "tags": Family(TAGS, ("<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), tools=True),
}
