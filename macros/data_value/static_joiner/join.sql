{#-
    Static Joiner: facts with columns of a reference at rest.

    Without `as_of` the reference has one row for each key, and a fact takes today's. With `as_of` it has versions, and a
    fact takes the version that was valid at its time, by the rule of the macro `as_of`: half-open, so at the instant of a
    change it is the new version. `reference` is then SCD Type 2, or the current rows of SCD Type 4 with their past in
    `history`, which may or may not hold the current rows too.

    A reference that would multiply facts stops the query: the check is a window over the reference alone. It is a part
    of the join's condition and not a column, because Spark leaves out a column that nothing reads.
-#}

{% macro static_joiner(
    facts,
    reference,
    keys,
    columns,
    as_of=none,
    history=none,
    join_type='left',
    unmatched=none,
    effective_from='effective_from',
    effective_to='effective_to',
    min_reference_rows=1,
    broadcast_max_mb=none
) %}
    {{ return(adapter.dispatch('static_joiner', 'lakehouse_patterns')(
        facts, reference, keys, columns, as_of, history, join_type, unmatched, effective_from, effective_to,
        min_reference_rows, broadcast_max_mb
    )) }}
{% endmacro %}

{% macro default__static_joiner(
    facts,
    reference,
    keys,
    columns,
    as_of,
    history,
    join_type,
    unmatched,
    effective_from,
    effective_to,
    min_reference_rows,
    broadcast_max_mb
) %}
    {%- set join = lakehouse_patterns._static_join(
        reference, keys, columns, as_of, history, join_type, unmatched, effective_from, effective_to
    ) -%}
    {%- do lakehouse_patterns.require(
        min_reference_rows is integer and min_reference_rows >= 0,
        "min_reference_rows must be a whole number from 0, got '" ~ min_reference_rows ~ "'"
    ) -%}
    {%- set hint = lakehouse_patterns._static_joiner_hint(join, broadcast_max_mb) -%}
    {{ return(lakehouse_patterns._static_joiner_sql(
        join, facts, lakehouse_patterns._static_joiner_checked_sql(join), min_reference_rows, hint
    )) }}
{% endmacro %}


{% macro _static_join(
    reference, keys, columns, as_of, history, join_type, unmatched, effective_from, effective_to
) %}
    {#- The checked arguments; `keys` from columns of the facts to those of the reference, `columns` from new names. -#}
    {%- do lakehouse_patterns.require_one_of('join_type', join_type, ['left', 'inner']) -%}
    {%- set join = {
        'reference': reference,
        'history': history,
        'keys': lakehouse_patterns._static_joiner_names('keys', keys),
        'columns': lakehouse_patterns._static_joiner_names('columns', columns),
        'as_of': as_of,
        'join_type': join_type,
        'unmatched': unmatched or {},
        'effective_from': effective_from,
        'effective_to': effective_to,
    } -%}
    {%- do lakehouse_patterns.require(
        history is none or as_of is not none,
        'static_joiner has history, the past versions of SCD Type 4, but no as_of, the time whose version a fact takes'
    ) -%}
    {%- do lakehouse_patterns.require(
        join.unmatched is mapping, 'unmatched must map new columns to SQL expressions, got ' ~ unmatched
    ) -%}
    {%- do lakehouse_patterns.require_known_keys('unmatched', join.unmatched, join.columns) -%}
    {%- do lakehouse_patterns.require(
        join_type == 'left' or not join.unmatched,
        'static_joiner has unmatched, the values of facts without a match, but an inner join keeps no such fact'
    ) -%}
    {{ return(join) }}
{% endmacro %}


{% macro _static_joiner_names(argument, given) %}
    {#- A mapping of names, from a list of equal names or one name, too. -#}
    {%- set names = {} -%}
    {%- if given is mapping -%}
        {%- do names.update(given) -%}
    {%- else -%}
        {%- for name in lakehouse_patterns.as_list(given) -%}
            {%- do names.update({name: name}) -%}
        {%- endfor -%}
    {%- endif -%}
    {%- do lakehouse_patterns.require(
        names | length > 0,
        'static_joiner needs ' ~ argument ~ ', a list of columns or a mapping of names, got ' ~ given
    ) -%}
    {{ return(names) }}
{% endmacro %}


{% macro _static_joiner_sql(join, facts, versions, min_reference_rows=0, hint='') %}
    {#- The join of the facts with versions that _static_joiner_versions_sql gave, checked or not. -#}
    {%- set conditions = [] -%}
    {%- for name in join['keys'] -%}
        {%- do conditions.append(
            lakehouse_patterns.quoted_name(name, 'facts') ~ ' = versions.lakehouse_patterns_key_' ~ loop.index
        ) -%}
    {%- endfor -%}
    {%- if join.as_of is not none -%}
        {%- do conditions.append(lakehouse_patterns.as_of(
            'facts.lakehouse_patterns_as_of', 'versions', 'lakehouse_patterns_from', 'lakehouse_patterns_to'
        )) -%}
    {%- endif -%}
select {{- ' ' ~ hint if hint }}
    facts.* {{- ' except (lakehouse_patterns_as_of)' if join.as_of is not none }}
    {%- for name in join.columns %},
    {%- set value = 'versions.lakehouse_patterns_column_' ~ loop.index %}
    {%- if name in join.unmatched %}
    case when versions.lakehouse_patterns_key_1 is null then {{ join.unmatched[name] }} else {{ value }} end
        as {{ lakehouse_patterns.quoted_name(name) }}
    {%- else %}
    {{ value }} as {{ lakehouse_patterns.quoted_name(name) }}
    {%- endif %}
    {%- endfor %}
from (
    {{ lakehouse_patterns._static_joiner_facts_sql(join, facts, min_reference_rows) }}
) as facts
{{ join.join_type }} join (
    {{ versions }}
) as versions
    on {{ conditions | join(' and ') }}
{%- endmacro %}


{% macro _static_joiner_facts_sql(join, facts, min_reference_rows) %}
    {%- if join.as_of is not none -%}
    select
        * except (lakehouse_patterns_time),
        {{ lakehouse_patterns._instant('lakehouse_patterns_time', 'as_of of static_joiner') }} as lakehouse_patterns_as_of
    from (
        select
            *,
            {{ join.as_of }} as lakehouse_patterns_time
        from {{ facts }}
        {{ lakehouse_patterns._static_joiner_ready_sql(join, min_reference_rows) }}
    )
    {%- else -%}
    select * from {{ facts }}
    {{ lakehouse_patterns._static_joiner_ready_sql(join, min_reference_rows) }}
    {%- endif -%}
{% endmacro %}


{% macro _static_joiner_ready_sql(join, min_reference_rows) %}
    {#- A reference that is being loaded would make all facts unmatched. Without facts nothing is checked (`--empty`). -#}
    {%- if min_reference_rows > 0 -%}
    where case
        when (select count(*) from {{ join.reference }}) >= {{ min_reference_rows }} then true
        else raise_error({{ lakehouse_patterns.text_literal(
            'lakehouse_patterns: the reference of static_joiner has fewer rows than min_reference_rows, '
            ~ min_reference_rows ~ ': load it first, or allow an empty one with min_reference_rows=0'
        ) }})
    end
    {%- endif -%}
{% endmacro %}
