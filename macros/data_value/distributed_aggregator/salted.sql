{#-
    Distributed Aggregator, salting: a hot key is spread over several groups (key, salt), and these are merged by key.

    The salt is a hash of columns of the row. A random one is another when a task is retried, so that a row can move to a
    group that is already read.
-#}

{% macro salted_aggregate(relation, group_by, salt_by, measures=none, salts=3) %}
    {{ return(adapter.dispatch('salted_aggregate', 'lakehouse_patterns')(
        relation, group_by, salt_by, measures, salts
    )) }}
{% endmacro %}

{% macro default__salted_aggregate(relation, group_by, salt_by, measures, salts) %}
    {%- set keys, salted = lakehouse_patterns.as_list(group_by), lakehouse_patterns.as_list(salt_by) -%}
    {%- set measures = lakehouse_patterns._measures(measures) -%}
    {%- do lakehouse_patterns._require_names('salted_aggregate', keys, measures) -%}
    {%- do lakehouse_patterns.require(
        salted | length > 0 and '' not in salted,
        'salted_aggregate needs salt_by: columns that differ between the rows of one key, such as their id'
    ) -%}
    {%- do lakehouse_patterns.require(
        salts is integer and salts is not boolean and salts >= 2,
        'salts must be a whole number of at least 2, got ' ~ salts
    ) -%}
    {%- set names = lakehouse_patterns.quoted_names(keys) -%}
    {%- set salt = lakehouse_patterns._salt(salted, salts) ~ ' as lakehouse_patterns_salt' -%}
select
    {%- for name in names %}
    {{ name }},
    {%- endfor %}
    {{ lakehouse_patterns._named_parts(measures) }}
from (
    select
        {%- for name in names %}
        {{ name }},
        {%- endfor %}
        {{ lakehouse_patterns._merged_parts(measures) }}
    from (
        select
            {%- for name in names %}
            {{ name }},
            {%- endfor %}
            lakehouse_patterns_salt,
            {{ lakehouse_patterns._first_parts(measures) }}
        from (
            {{ lakehouse_patterns._measured_rows(relation, names + [salt], measures) }}
        )
        group by {{ (names + ['lakehouse_patterns_salt']) | join(', ') }}
    )
    {%- if names %}
    group by {{ names | join(', ') }}
    {%- endif %}
)
{%- endmacro %}


{% macro _salt(columns, salts) %}
    {{ return('pmod(xxhash64(' ~ lakehouse_patterns.quoted_names(columns) | join(', ') ~ '), ' ~ salts ~ ')') }}
{% endmacro %}
