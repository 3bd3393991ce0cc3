{#- Texts as JSON. `from_json` and `get_json_object` take the first value of a text and drop what follows it. -#}

{% macro _json_value(text, type) %}
    {#-
        The value of a type that a JSON text holds; NULL if the text is anything but exactly one such value: two objects
        glued together, anything behind the value, text that is no JSON or no UTF-8. `python_jobs/shared/records/` has
        the same rule.

        The text is read within a list, before a second list of ours: from_json finds both as they are only if the text
        ends where its value ends. One look at them: Spark would parse the text again for each.
    -#}
    {%- set lists = "from_json(concat('[[', " ~ text ~ ", '],[null,null]]'), "
        ~ lakehouse_patterns.text_literal('array<array<' ~ type ~ '>>')
        ~ ", map('allowSingleQuotes', 'false', 'allowNonNumericNumbers', 'false'))" -%}
    {{ return(
        'get(get(get(filter(array(case when is_valid_utf8(' ~ text ~ ') then ' ~ lists ~ ' end), '
        ~ 'pair -> size(pair) = 2 and size(get(pair, 0)) = 1 and size(get(pair, 1)) = 2), 0), 0), 0)'
    ) }}
{% endmacro %}
