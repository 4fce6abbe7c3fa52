#!/usr/bin/env python3
"""Writes features.jsonl: small templates and what jinja2 makes of them with the settings of Hugging
Face's apply_chat_template. Needs jinja2 3.1; run it again after adding a row."""
import json
import os

import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
environment.filters["tojson"] = tojson
environment.globals["raise_exception"] = raise_exception

CONTEXT = {
    "s": "Hello, World", "empty": "", "zh": "你好，世界", "n": 7, "z": 0, "f": 2.5, "t": True, "none": None,
    "l": [3, 1, 2], "names": ["b", "A", "c"], "nested": [[1, 2], [3, 4]],
    "d": {"b": 1, "a": [1, "x", None, True, 1.5], "items": "key"},
    "people": [{"name": "ann", "age": 3}, {"name": "bob", "age": 5, "x": {"y": 1}}, {"name": "cy"}],
}

TEMPLATES = [
    # whitespace
    "a\n{% if t %}\nb\n{% endif %}\nc\n", "a\n  {% if t %}  \n  b\n  {% endif %}  \nc", "{%- if t -%}  \n x \n {%- endif -%} \n y",
    "  {{ n }}\n\n", "a {# comment #}\nb", "  {# c #}\n  b\n", "a\n  {#- c -#}\n  b", "x {%+ if t %}y{% endif %}", "  {%+ if t %}y{% endif %}",
    "{% if t +%}\ny{% endif %}", "{% for i in l %}\n  {{ i }}\n{% endfor %}\n!", "{% raw %}{{ x }}{% if %}{% endraw %}", "{% raw %}\n a {% endraw %}\nb",
    "{%- raw -%}  a  {%- endraw -%}  b", "\r\na\rb\r\n", "{{ 'a' }}\n\n", "a {{- ' b ' -}} c", "\u3000{{- n -}}\u00a0x", "{{ {'a': {'b': 1}}['a']['b'] }}",
    "  {% set x = 1 %}  {% set y = 2 %}\n{{ x }}{{ y }}", "{% set x = 1 %}\n  {% set y = 2 %}\n{{ x + y }}", "{{ '}}' }}{{ \"%}\" }}", "a{% if t %} b{% endif %}\nc",
    "", "\n", "\n\n", "{", "{a}", "a { b", "}} %}", "\t{% if t %}\tx{% endif %}\t",
    # values and printing
    "{{ t }} {{ none }} {{ f }} {{ n }} {{ l }} {{ d }} {{ undefined_thing }}", "{{ [1, 'a', \"it's\", 'q\"', none, true, 1.0, (1,), (1, 2), {'k': [1]}] }}",
    "{{ 1e20 }} {{ 1e16 }} {{ 1e15 }} {{ 0.0001 }} {{ 0.00001 }} {{ 1.5e300 }} {{ 100.0 }} {{ 3.14159 }}", "{{ 'a\\nb\\t\\\\ \\x41 \\u4f60 \\q' }}", "{{ ['a\\nb', '\\x01é你'] }}",
    "{{ 'a' 'b' \"c\" }}", "{{ 1_000 }} {{ () }} {{ [] }} {{ {} }}", "{{ 1, 2 }}", "{{ (1) }}",
    # arithmetic
    "{{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 7 / 2 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 7.5 // 2 }} {{ -7.5 % 2 }}",
    "{{ 1 + 2 * 3 - 4 }} {{ (1 + 2) * 3 }} {{ 1 + t }} {{ 1.5 + 1 }} {{ -n }} {{ +n }} {{ - f }}", "{{ 'a' + 'b' }} {{ 'ab' * 3 }} {{ [1] + [2] }} {{ [0] * 3 }} {{ 3 * 'x' }}",
    "{{ 'a' ~ 1 ~ none ~ 1.5 ~ undefined_thing ~ l }}", "{{ 1 + 2 ~ 3 }}", "{{ 10 - 2 - 3 }} {{ 2 ** 3 ** 2 }} {{ 100 / 10 / 5 }}", "{{ -3|abs }} {{ -3.5|abs }} {{ 2 ** 62 }}",
    "{{ '%s is %d and %.2f%%' % ('x', 3, 1.005) }} {{ '%s' % 'y' }} {{ '%s %s'|format('a', 1) }} {{ '{} {1} {a}' | string }}", "{{ '{} {}'.format(1, 'b') }} {{ '{1}{0}'.format('a', 'b') }} {{ '{x}{{}}'.format(x=3) }}",
    # comparison, logic
    "{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 1 == 1.0 }} {{ t == 1 }} {{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ 'a' == 1 }} {{ none == none }} {{ l == [3, 1, 2] }} {{ d == d }}",
    "{{ 'ell' in s }} {{ 'x' not in s }} {{ 1 in l }} {{ 'b' in d }} {{ 9 in l }} {{ 'a' in undefined_thing }} {{ (1, 2) in [(1, 2)] }}", "{{ not t }} {{ not not empty }} {{ t and n }} {{ z or 'x' }} {{ z and 'x' }} {{ empty or none }}",
    "{{ 'y' if t else 'n' }} {{ 'y' if z }}| {{ 'a' if z else 'b' if z else 'c' }}", "{{ not 1 == 2 }} {{ 1 == 1 and 2 == 2 or 3 == 4 }}", "{{ undefined_thing == undefined_other }} {{ undefined_thing == none }}",
    # tests
    "{{ s is string }} {{ n is string }} {{ n is number }} {{ t is number }} {{ t is boolean }} {{ n is integer }} {{ t is integer }} {{ f is float }} {{ d is mapping }} {{ l is mapping }}",
    "{{ l is iterable }} {{ s is iterable }} {{ n is iterable }} {{ l is sequence }} {{ d is sequence }} {{ s is sequence }} {{ n is sequence }} {{ none is none }} {{ n is not none }} {{ u is defined }} {{ u is undefined }} {{ u is not defined }}",
    "{{ n is odd }} {{ n is even }} {{ n is divisibleby 7 }} {{ n is divisibleby(2) }} {{ n is eq 7 }} {{ n is equalto 8 }} {{ n is gt 3 }} {{ n is lessthan 3 }} {{ 1 is in l }} {{ 1 is in [2] }} {{ t is true }} {{ z is false }} {{ t is sameas true }}",
    "{{ range is callable }} {{ s is callable }} {{ 'abc' is lower }} {{ 'ABC' is upper }} {{ 'Abc' is lower }} {{ 'tojson' is filter }} {{ 'odd' is test }} {{ 'nope' is filter }}", "{{ not u is defined }} {{ d.b is defined and d.b == 1 }} {{ d.zzz is defined }} {{ d['zzz'] is none }}",
    # attributes, subscripts, slices
    "{{ d.b }} {{ d['b'] }} {{ d.items() | list }} {{ d['items'] }} {{ d.a[1] }} {{ d.a[-1] }} {{ people[1].x.y }} {{ l.0 }} {{ nested[1][0] }}", "{{ l[1:] }} {{ l[:-1] }} {{ l[::-1] }} {{ l[::2] }} {{ l[5:] }} {{ l[-100:100] }} {{ s[0] }} {{ s[-1] }} {{ s[1:4] }} {{ s[::-1] }} {{ zh[1:3] }} {{ zh[0] }} {{ zh[-1] }} {{ zh[::2] }}",
    "{{ l[9] }}|{{ d.nope }}|{{ d['nope'] }}|{{ s[99] }}|{{ none.x }}|{{ n.x }}", "{{ d.get('b') }} {{ d.get('x') }} {{ d.get('x', 5) }} {{ d.keys() | list }} {{ d.values() | list }} {{ d | items | list }} {{ d | length }}", "{{ (1, 2, 3)[1] }} {{ (1, 2, 3)[1:] }} {{ 'abc'[1:][0] }}",
    # string methods
    "{{ s.split(', ') }} {{ ' a  b '.split() }} {{ 'a,b,c'.split(',', 1) }} {{ 'a,b,c'.rsplit(',', 1) }} {{ ''.split(',') }} {{ ''.split() }} {{ ' a b c '.split(none, 1) }} {{ 'aXbXc'.split('X')[-1] }}",
    "[{{ '  a '.strip() }}] [{{ '  a '.lstrip() }}] [{{ '  a '.rstrip() }}] [{{ 'xxaxx'.strip('x') }}] [{{ '\\n\\n a\\n'.strip('\\n') }}] [{{ 'abcba'.strip('ab') }}]", "{{ s.startswith('Hell') }} {{ s.endswith('x') }} {{ s.startswith(('a', 'H')) }} {{ s.upper() }} {{ s.lower() }} {{ 'hello wORLD-x y2k'.title() }} {{ 'hELLO'.capitalize() }}",
    "{{ s.replace('l', 'L') }} {{ s.replace('l', 'L', 1) }} {{ 'ab'.replace('', '-') }} {{ s.find('o') }} {{ s.rfind('o') }} {{ s.find('zz') }} {{ zh.find('世') }} {{ s.count('l') }} {{ 'a\\nb\\r\\nc'.splitlines() }} {{ 'a-b-c'.partition('-') }} {{ 'a-b-c'.rpartition('-') }}", "{{ '12'.isdigit() }} {{ 'a1'.isalnum() }} {{ ' '.isspace() }} {{ 'AB'.isupper() }} {{ 'ab'.islower() }} {{ 'ab'.isalpha() }} {{ ', '.join(['a', 'b']) }} {{ 'prefix-x'.removeprefix('prefix-') }} {{ 'x.txt'.removesuffix('.txt') }} [{{ 'a'.ljust(4) }}] [{{ 'a'.rjust(4, '.') }}] [{{ 'ab'.center(5) }}] [{{ 'a'.center(4) }}]",
    # filters
    "{{ l | length }} {{ zh | length }} {{ l | first }} {{ l | last }} {{ [] | first }}| {{ s | last }} {{ l | sort }} {{ l | sort(reverse=true) }} {{ names | sort }} {{ names | sort(case_sensitive=true) }} {{ l | reverse | list }} {{ 'abc' | reverse }} {{ l | sum }} {{ l | min }} {{ l | max }} {{ [1, 1, 2] | unique | list }} {{ ['a', 'A'] | unique | list }}",
    "{{ people | map(attribute='name') | list }} {{ people | map(attribute='age', default=0) | list }} {{ names | map('upper') | join(',') }} {{ people | selectattr('age') | map(attribute='name') | list }} {{ people | selectattr('age', 'defined') | list | length }} {{ people | selectattr('name', 'equalto', 'bob') | map(attribute='age') | first }} {{ people | rejectattr('age', 'defined') | list }} {{ people | map(attribute='x.y', default='-') | list }}",
    "{{ l | select('odd') | list }} {{ l | reject('odd') | list }} {{ [0, 1, '', 'a'] | select | list }} {{ l | select('gt', 1) | list }} {{ l | join(', ') }} {{ people | join('/', attribute='name') }} {{ l | join }} {{ [1, none, 'a'] | join('-') }} {{ people | sum(attribute='age', start=0) if false else 'skip' }} {{ people[:2] | sum(attribute='age') }} {{ people | sort(attribute='name', reverse=true) | map(attribute='name') | join }}",
    "{{ u | default('x') }} {{ none | default('x') }} {{ none | default('x', true) }} {{ empty | d('y', boolean=true) }} {{ u | default }}| {{ u | upper }}| {{ u | length }} {{ u | list }} {{ u | join }}|", "{{ '  a ' | trim }} {{ 'xax' | trim('x') }} {{ s | upper }} {{ s | lower }} {{ 'hello world-foo (bar) it\\'s' | title }} {{ 'aBC' | capitalize }} {{ s | replace('l', 'L', 2) }} {{ 5 | string + 'a' }} {{ '<a & \"b\">' | e }} {{ '<' | safe }} {{ 'a b  c' | wordcount }}",
    "{{ '42' | int + 1 }} {{ 'x' | int }} {{ 'x' | int(9) }} {{ '3.9' | int }} {{ 3.9 | int }} {{ 'ff' | int(base=16) }} {{ '1.5' | float }} {{ 'x' | float }} {{ 3 | float }} {{ none | int }} {{ ' 7 ' | int }} {{ '-5' | int }} {{ t | int }}", "{{ 2.5 | round }} {{ 3.5 | round }} {{ 2.675 | round(2) }} {{ 2.1 | round(0, 'ceil') }} {{ 2.9 | round(method='floor') }} {{ 7 | round }} {{ 1234.5 | round(-2) }}",
    "{{ 'a\\nb\\n\\nc' | indent }}|{{ 'a\\nb' | indent(2, true) }}|{{ 'a\\n\\nb' | indent(2, blank=true) }}|{{ 'a\\nb' | indent('> ') }}|{{ 'a\\n' | indent }}|", "{{ d | tojson }} {{ zh | tojson }} {{ '<\\'\"\\\\\\n\\x01\\x7f/é>' | tojson }} {{ none | tojson }} {{ 1.0 | tojson }} {{ [] | tojson }} {{ {} | tojson }} {{ (1, 2) | tojson }} {{ {1: 2, none: 3, true: 4} | tojson }}",
    "{{ d | tojson(indent=2) }}\n{{ [] | tojson(indent=2) }} {{ [[], {}] | tojson(indent=4) }} {{ d | tojson(separators=(',', ':')) }} {{ d | tojson(sort_keys=true) }} {{ zh | tojson(ensure_ascii=true) }} {{ '😀' | tojson(ensure_ascii=true) }}", "{{ d | dictsort }} {{ {'b': 1, 'A': 2} | dictsort }} {{ {'b': 1, 'a': 2} | dictsort(by='value') }} {{ {'b': 1, 'a': 2} | dictsort(reverse=true) }} {{ d | list }} {{ 'abc' | list }} {{ people[0] | attr('name') }}|",
    # statements
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "{% for a, b in nested %}{{ a }}{{ b }} {% endfor %}{% for (a, b) in nested %}{{ a }}{% endfor %}", "{% for x in l %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}[{{ loop.previtem }},{{ loop.nextitem }}]{{ loop.cycle('a', 'b') }} {% endfor %}",
    "{% for x in [] %}a{% else %}none{% endfor %}{% for x in u %}a{% else %}none{% endfor %}", "{% for x in l if x > 1 %}{{ x }}{{ loop.index }}{{ loop.last }} {% endfor %}{% for x in l if x > 9 %}{% else %}E{% endfor %}", "{% for c in 'héy' %}{{ c }}.{% endfor %}{% for k in d %}{{ k }},{% endfor %}", "{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for i in range(3) %}{{ i }}{% endfor %} {{ range(2, 8, 3) | list }} {{ range(5, 0, -2) | list }} {{ range(0) | list }}", "{% set x = 1 %}{% for i in l %}{% set x = x + i %}{{ x }} {% endfor %}{{ x }}", "{% set ns = namespace(a=1, b='') %}{% for i in l %}{% set ns.a = ns.a + i %}{% set ns.b = ns.b ~ i %}{% endfor %}{{ ns.a }} {{ ns.b }} {{ ns.c is defined }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set (c, e) = [3, 4] %}{{ c }}{{ e }}{% set x = 1, %}{{ x }}", "{% set x %}\n a {{ n }}\n{% endset %}[{{ x }}]", "{% set x | upper | trim %} ab {% endset %}[{{ x }}]", "{% if z %}a{% elif n == 7 %}b{% else %}c{% endif %}{% if z %}{% elif z %}{% else %}c{% endif %}", "{% if t %}{% set q = 1 %}{% endif %}{{ q }}",
    "{% macro m(a, b=2, c='x') %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }} {{ m(1, 3) }} {{ m(1, c='y') }} {{ m(a=5) }} {{ m() }}", "{% macro m(a) %}[{{ a }}{{ caller() }}]{% endmacro %}{% call m(1) %}body {{ n }}{% endcall %}", "{% macro m() %}{{ caller(3) }}{% endmacro %}{% call(x) m() %}<{{ x }}>{% endcall %}", "{% macro f(k) %}{% if k > 0 %}{{ k }}{{ f(k - 1) }}{% endif %}{% endmacro %}{{ f(3) }}",
    "{% set y = 5 %}{% macro m() %}{{ y }}{% endmacro %}{% set y = 6 %}{{ m() }}", "{% macro m(a) %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, z=4) }}", "{% macro m(x) %}{% set q = x %}{{ q }}{% endmacro %}{{ m(1) }}{{ q }}", "{% filter upper %}ab{{ s }}{% endfilter %}", "{% with a = 1, b = n %}{{ a }}{{ b }}{% endwith %}{{ a }}", "{% for r in nested %}{% for x in r %}{{ x }}{{ loop.index }} {% endfor %}{{ loop.index }};{% endfor %}",
    "{% set d2 = dict(a=1, b=2) %}{{ d2.a }}{{ d2 }}{% set ns = namespace() %}{% set ns.q = 3 %}{{ ns.q }}{{ ns['q'] }}", "{% set l2 = l + [4] %}{{ l2 }}{% set x = (l | first, l | last) %}{{ x }}", "{% for x in l %}{{ x }}{{ ', ' if not loop.last }}{% endfor %}", "{% for m in people %}{{ m.get('age', '?') }}{{ m['x'].y if m['x'] is defined }} {% endfor %}", "{{ s.split(', ') | map('lower') | list | tojson }}", "{{ [l, [1]] | map('length') | list }}",
    "{{ 'a' is in ['a'] and 'b' is not in ['a'] }}", "{{ n is number and n is not string }}", "{{ s[:5] + '...' if s | length > 5 else s }}", "{{ (s.split(', ') | last).upper() }}", "{{ people | map(attribute='name') | map('capitalize') | join(' & ') }}",
    # errors
    "{{ 'a' + none }}", "{{ 'a' + 1 }}", "{{ u.x }}", "{{ u() }}", "{{ u + 1 }}", "{{ d.b.c.d }}", "{{ none['x']['y'] }}", "{{ 1 / 0 }}", "{{ 1 // 0 }}", "{{ 1 % 0 }}", "{{ 'a' in none }}", "{{ 1 in 'a' }}", "{{ 1 < 'a' }}", "{{ u < 1 }}", "{{ s | nofilter }}", "{{ s is notest }}", "{{ raise_exception('no') }}", "{{ l.append(1) }}", "{{ d.update({}) }}", "{{ d.pop('b') }}",
    "{% for x in n %}{% endfor %}", "{% for a, b in l %}{% endfor %}", "{% set d.x = 1 %}", "{% if %}{% endif %}", "{% if t %}", "{% endif %}", "{{ }}", "{{ 1 + }}", "{{ 'abc }}", "{% nope %}", "{{ n", "{# x", "{% raw %}x", "{{ (1 }}", "{{ range(1000000) | length }}", "{{ s.nomethod() }}", "{{ n() }}", "{{ s | from_json }}", "{{ u | tojson }}", "{{ {[1]: 2} }}", "{{ - s }}", "{{ s @ n }}", "{% break %}", "{% set true = 1 %}", "{{ l[::0] }}", "{{ ''.split('') }}", "{{ n | length }}", "{{ none | length }}", "{{ -u }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
]

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "features.jsonl"), "w") as out:
    out.write(json.dumps({"context": CONTEXT}) + "\n")
    for source in TEMPLATES:
        row = {"template": source}
        try:
            row["rendered"] = environment.from_string(source).render(**CONTEXT)
        except Exception as error:  # whatever Python raises counts as an error
            row["error"] = type(error).__name__ + ": " + str(error)[:100]
        out.write(json.dumps(row) + "\n")
