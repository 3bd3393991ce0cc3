{#-
    Circuit Breaker for Data Pipelines, in dbt: a model isn't built while the circuit of one of its sources isn't
    closed. The model's table and the tables built from it keep their last good version.

    The macros read the files that `pipeline_circuit_breaker.py` writes. A source without a file is refused, because a
    misspelt name would check no circuit.
-#}

{% macro require_closed_circuits(sources, circuits) %}
    {{ return(adapter.dispatch('require_closed_circuits', 'lakehouse_patterns')(sources, circuits)) }}
{% endmacro %}

{% macro default__require_closed_circuits(sources, circuits) %}
    {%- set names = lakehouse_patterns.as_list(sources) -%}
    {%- do lakehouse_patterns.require(names, 'require_closed_circuits needs sources, a name or a list of names') -%}
    {%- do lakehouse_patterns.require(
        circuits, "require_closed_circuits needs circuits, a folder, got '" ~ circuits ~ "'"
    ) -%}
    {%- if execute -%}
        {%- set found = {} -%}
        {%- for row in run_query(lakehouse_patterns.circuits_sql(circuits)).rows -%}
            {%- do found.update({row['name']: row}) -%}
        {%- endfor -%}
        {%- for name in names -%}
            {%- do lakehouse_patterns.require(
                name in found,
                "there is no circuit '" ~ name ~ "' in " ~ circuits ~ ', only ' ~ (found.keys() | sort | join(', '))
            ) -%}
            {%- do lakehouse_patterns.require(
                found[name]['state'] == 'closed',
                "the circuit of source '" ~ name ~ "' is " ~ found[name]['state'] ~ ' until ' ~ found[name]['retry_at']
                ~ ' (' ~ found[name]['reason'] ~ '); nothing was built from it'
            ) -%}
        {%- endfor -%}
    {%- endif -%}
    {{ return('') }}
{% endmacro %}

{% macro circuits_sql(circuits) %}
    {{ return(adapter.dispatch('circuits_sql', 'lakehouse_patterns')(circuits)) }}
{% endmacro %}

{% macro default__circuits_sql(circuits) %}
select
    name,
    state,
    retry_at,
    reason,
    openings,
    transitions,
    size(pending) as pending
from json.{{ lakehouse_patterns.quoted_name(lakehouse_patterns.literal_path(circuits) ~ '/*.json') }}
{% endmacro %}
