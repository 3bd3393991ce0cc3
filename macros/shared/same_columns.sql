{#- What materializations that write a part of a table ask before they do. -#}

{% macro require_same_columns(relation, stored, given) %}
    {%- set faults, types = [], {} -%}
    {%- for column in given -%}
        {%- do types.update({column.name: column.dtype}) -%}
    {%- endfor -%}
    {%- for column in stored -%}
        {%- if column.name not in types -%}
            {%- do faults.append('no column ' ~ column.name) -%}
        {%- elif types[column.name] != column.dtype -%}
            {%- do faults.append(column.name ~ ' as ' ~ types[column.name] ~ ' in place of ' ~ column.dtype) -%}
        {%- endif -%}
    {%- endfor -%}
    {%- for name in types if name not in stored | map(attribute='name') -%}
        {%- do faults.append(name ~ ', which the table lacks') -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require(
        not faults,
        'the rows for ' ~ relation ~ ' have ' ~ (faults | join(', '))
        ~ "; select the table's columns, or alter the table first"
    ) -%}
{% endmacro %}


{% macro refuse_full_refresh(materialization) %}
    {%- do lakehouse_patterns.require(
        not should_full_refresh(),
        "materialized='" ~ materialization ~ "' knows the rows of one slice, a full refresh would lose all the others: "
        ~ 'drop the table and run each slice'
    ) -%}
{% endmacro %}
