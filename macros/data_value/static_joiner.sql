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


{% macro _static_joiner_hint(join, broadcast_max_mb) %}
    {#-
        A hint to copy the reference to every executor, if Spark's estimate of what the join reads of it is small enough.
        A table that doesn't exist yet has no size: a model compiles without tables.
    -#}
    {%- if broadcast_max_mb is none -%}
        {{ return('') }}
    {%- endif -%}
    {%- do lakehouse_patterns.require(
        lakehouse_patterns._is_finite(broadcast_max_mb) and broadcast_max_mb > 0,
        "broadcast_max_mb must be a number above 0, got '" ~ broadcast_max_mb ~ "'"
    ) -%}
    {%- do lakehouse_patterns.require(
        join.reference is not string,
        "broadcast_max_mb needs the reference as ref() or source(), whose size it reads, got '" ~ join.reference ~ "'"
    ) -%}
    {%- if not execute or load_relation(join.reference) is none -%}
        {{ return('') }}
    {%- endif -%}
    {%- set rows = lakehouse_patterns._static_joiner_rows_sql(join, join.reference, join.effective_to) -%}
    {%- set megabytes = lakehouse_patterns._estimated_bytes(rows) / 1000000 -%}
    {%- if megabytes <= broadcast_max_mb -%}
        {{ return('/*+ broadcast(versions) */') }}
    {%- endif -%}
    {%- do log(
        'lakehouse_patterns: static_joiner does not broadcast ' ~ join.reference ~ ', which has ' ~ '%.3g' % megabytes
        ~ ' MB by the estimate of Spark, more than the ' ~ broadcast_max_mb ~ ' MB of broadcast_max_mb',
        info=true
    ) -%}
    {{ return('') }}
{% endmacro %}


{% macro _estimated_bytes(sql) %}
    {#- What Spark's optimizer estimates of the result of a query, which isn't run. -#}
    {%- set plan = run_query('explain cost ' ~ sql).rows[0][0] -%}
    {%- set found = modules.re.search('sizeInBytes=([0-9.]+(?:E[+]?[0-9]+)?) ([KMGTPE]i)?B', plan) -%}
    {%- set power = 'KMGTPE'.find(found[2][0]) + 1 if found[2] else 0 -%}
    {{ return(found[1] | float * 1024 ** power) }}
{% endmacro %}
