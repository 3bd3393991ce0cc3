{#- Static Joiner, the reference: its versions that a fact can match, and the check that one at most does. -#}

{% macro _static_joiner_checked_sql(join) %}
    {#- The versions; the query ends if two hold for one key at one time. -#}
    select * from (
        {{ lakehouse_patterns._static_joiner_judged_sql(join) }}
    )
    where case
        when lakehouse_patterns_is_ambiguous then raise_error(concat(
            {{ lakehouse_patterns.text_literal(
                'lakehouse_patterns: the reference of static_joiner has several rows that match one fact, of the key '
            ) }},
            to_json(struct({{ lakehouse_patterns._static_joiner_keys(join) }})),
            {{ lakehouse_patterns.text_literal(
                ': a key needs one row'
                ~ (', and its versions need validities that do not overlap' if join.as_of is not none else '')
                ~ '; correct the reference'
            ) }}
        ))
        else true
    end
{%- endmacro %}


{% macro _static_joiner_judged_sql(join) %}
    {#- The versions with `lakehouse_patterns_is_ambiguous`: another version of the key holds at the same time. -#}
    {%- set keys = lakehouse_patterns._static_joiner_keys(join) -%}
    select
        *,
        {%- if join.as_of is none %}
        count(*) over (partition by {{ keys }}) > 1 as lakehouse_patterns_is_ambiguous
        {%- else %}
        {#- If any two versions of a key overlap, two that follow each other do. #}
        coalesce(
            lead(lakehouse_patterns_from) over (
                partition by {{ keys }} order by lakehouse_patterns_from asc, lakehouse_patterns_to asc nulls last
            ) < coalesce(lakehouse_patterns_to, timestamp '9999-12-31 23:59:59.999999+00:00'),
            false
        ) as lakehouse_patterns_is_ambiguous
        {%- endif %}
    from (
        {{ lakehouse_patterns._static_joiner_versions_sql(join) }}
    )
{%- endmacro %}


{% macro _static_joiner_keys(join) %}
    {%- set names = [] -%}
    {%- for _ in join['keys'] -%}
        {%- do names.append('lakehouse_patterns_key_' ~ loop.index) -%}
    {%- endfor -%}
    {{ return(names | join(', ')) }}
{% endmacro %}


{% macro _static_joiner_versions_sql(join) %}
    {#- The rows of the reference that a fact can match. A key with a NULL part, and a version of no time, match none. -#}
    {%- set known = [] -%}
    {%- for _ in join['keys'] -%}
        {%- do known.append('lakehouse_patterns_key_' ~ loop.index ~ ' is not null') -%}
    {%- endfor -%}
    {%- if join.as_of is not none -%}
        {%- do known.append('lakehouse_patterns_from is not null') -%}
        {%- do known.append('(lakehouse_patterns_to is null or lakehouse_patterns_from < lakehouse_patterns_to)') -%}
    {%- endif -%}
    {%- if join.history is none -%}
        select * from (
            {{ lakehouse_patterns._static_joiner_rows_sql(join, join.reference, join.effective_to) }}
        )
        where {{ known | join(' and ') }}
    {%- else -%}
        {#- The current row counts once, whether the history has it or not; its validity has no end. #}
        select * except (lakehouse_patterns_is_current, lakehouse_patterns_current_from)
        from (
            select
                *,
                max(case when lakehouse_patterns_is_current then lakehouse_patterns_from end)
                    over (partition by {{ lakehouse_patterns._static_joiner_keys(join) }}) as lakehouse_patterns_current_from
            from (
                select *, true as lakehouse_patterns_is_current from (
                    {{ lakehouse_patterns._static_joiner_rows_sql(join, join.reference, none) }}
                )
                union all
                select *, false as lakehouse_patterns_is_current from (
                    {{ lakehouse_patterns._static_joiner_rows_sql(join, join.history, join.effective_to) }}
                )
            )
            where {{ known | join(' and ') }}
        )
        where lakehouse_patterns_is_current or not lakehouse_patterns_from <=> lakehouse_patterns_current_from
    {%- endif -%}
{% endmacro %}


{% macro _static_joiner_rows_sql(join, relation, effective_to) %}
    select
        {%- for name in join['keys'].values() %}
        {{ lakehouse_patterns.quoted_name(name) }} as lakehouse_patterns_key_{{ loop.index }},
        {%- endfor %}
        {%- for name in join.columns.values() %}
        {{ lakehouse_patterns.quoted_name(name) }} as lakehouse_patterns_column_{{ loop.index }}
            {{- ',' if not loop.last or join.as_of is not none }}
        {%- endfor %}
        {%- if join.as_of is not none %}
        {{ lakehouse_patterns._instant(
            lakehouse_patterns.quoted_name(join.effective_from), 'effective_from of static_joiner'
        ) }} as lakehouse_patterns_from,
        {{ lakehouse_patterns._instant(
            lakehouse_patterns.quoted_name(effective_to), 'effective_to of static_joiner'
        ) if effective_to is not none else 'cast(null as timestamp)' }} as lakehouse_patterns_to
        {%- endif %}
    from {{ relation }}
{%- endmacro %}
