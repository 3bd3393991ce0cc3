{#- Texts as JSON. `from_json` and `get_json_object` take the first value of a text and drop what follows it. -#}

{% macro _json_value(text, type, fractions=none) %}
    {#-
        The value of a type that a JSON text holds; NULL if the text is anything but exactly one such value: two objects
        glued together, anything behind the value, text that is no JSON or no UTF-8. `python_jobs/shared/records/` has
        the same rule.

        The text is read within a list, before a second list of ours: from_json finds both as they are only if the text
        ends where its value ends. One look at them: Spark would parse the text again for each.

        Spark hands a number with a fraction or an exponent to a string through a double: `1.10` becomes `1.1`, and of
        twenty digits the last ones are lost. `fractions` says how such numbers are read: as `numbers`, as `texts` with
        their digits, or as `marked` texts, of which `_as_written` gives the digits or the JSON text. A double or
        decimal of the type reads numbers only. The default is `texts`, or `numbers` for a type with a double, a
        decimal or a variant.
    -#}
    {%- if fractions is none -%}
        {%- set numeric = '(?i)\\b(double|float|real|decimal|dec|numeric|variant)\\b(?!`?\\s*:)' -%}
        {%- set fractions = 'numbers' if modules.re.search(numeric, type) else 'texts' -%}
    {%- endif -%}
    {%- set read = text if fractions == 'numbers' else lakehouse_patterns._marked_fractions(text) -%}
    {%- if fractions == 'texts' -%}
        {%- set read = 'replace(' ~ read ~ ", '" ~ lakehouse_patterns._json_mark() ~ "', '')" -%}
    {%- endif -%}
    {%- set lists = "from_json(concat('[[', " ~ read ~ ", '],[null,null]]'), "
        ~ lakehouse_patterns.text_literal('array<array<' ~ type ~ '>>')
        ~ ", map('allowSingleQuotes', 'false', 'allowNonNumericNumbers', 'false'))" -%}
    {{ return(
        'get(get(get(filter(array(case when is_valid_utf8(' ~ text ~ ') then ' ~ lists ~ ' end), '
        ~ 'pair -> size(pair) = 2 and size(get(pair, 0)) = 1 and size(get(pair, 1)) = 2), 0), 0), 0)'
    ) }}
{% endmacro %}


{% macro _json_mark() %}
    {#-
        The mark before a text that was a number in the JSON: a noncharacter of Unicode, which no text holds, escaped as in
        Spark's literals and Java's patterns.
    -#}
    {{ return('\\ufdd0') }}
{% endmacro %}


{% macro _marked_fractions(text) %}
    {#-
        The JSON text with each number that has a fraction or an exponent as a marked string; NULL if it holds the mark.
        `python_jobs/shared/records/json_records.py` reads numbers by the same rule. It goes token by token from the
        start, so that what is no JSON ends the search and stays what it is. All loops are possessive: Java's matcher
        needs no stack for them, however long the text is. A text without such a number is only looked through.
    -#}
    {%- set mark = lakehouse_patterns._json_mark() -%}
    {%- set string = '"[^"\\\\]*+(?:\\\\.[^"\\\\]*+)*+"' -%}
    {%- set integer = '-?(?:0|[1-9][0-9]*+)' -%}
    {%- set fraction = integer ~ '(?:\\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+' -%}
    {%- set tokens = '\\G([^"0-9-]*+)(?:(' ~ string ~ '|' ~ integer ~ '(?![0-9.eE]))|(' ~ fraction
        ~ ')(?=\\s*+(?:[,}\\]]|\\z)))' -%}
    {%- set holds_mark = mark ~ '|\\\\u[fF][dD][dD]0' -%}
    {%- set has_fraction = '(?:[:,\\[]|^)\\s*+-?[0-9]++[.eE]|' ~ holds_mark -%}
    {%- set marked = 'regexp_replace(' ~ text ~ ', ' ~ lakehouse_patterns.text_literal(tokens) ~ ", '$1$2\"" ~ mark
        ~ "$3\"')" -%}
    {{ return(
        'case when ' ~ text ~ ' rlike ' ~ lakehouse_patterns.text_literal(has_fraction)
        ~ ' then case when not ' ~ text ~ ' rlike ' ~ lakehouse_patterns.text_literal(holds_mark)
        ~ ' then replace(' ~ marked ~ ", '\"" ~ mark ~ "\"', '') end else " ~ text ~ ' end'
    ) }}
{% endmacro %}


{% macro _as_written(text) %}
    {#- The digits of a marked number, the JSON text of a list or an object with marked numbers, or the text itself. -#}
    {%- set mark = lakehouse_patterns._json_mark() -%}
    {{ return(
        'case when contains(' ~ text ~ ", '" ~ mark ~ "') then replace(regexp_replace(" ~ text ~ ', '
        ~ lakehouse_patterns.text_literal('"' ~ mark ~ '([^"]*)"') ~ ", '$1'), '" ~ mark ~ "', '') else " ~ text
        ~ ' end'
    ) }}
{% endmacro %}
