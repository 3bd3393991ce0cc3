{#- Audit-Write-Audit-Publish: audit 2, of the staged rows, in one scan. -#}

{% macro _awap_measure(options, scope) %}
    {#-
        One dict a period (without `period`: one in all) and audit: run, row_count, audit, value, baseline. One without
        `audit` is a period of which nothing but deleted rows is staged: there is nothing to measure, it goes.
    -#}
    {%- set measured = [] -%}
    {%- for row in run_query(lakehouse_patterns._awap_audit_sql(options, scope)).rows -%}
        {%- do measured.append(fromjson(row[0])) -%}
    {%- endfor -%}
    {%- if not measured and scope.interval -%}
        {#- Nothing staged and nothing published in [from, to): one period of no rows. -#}
        {%- for audit in scope.audits -%}
            {%- do measured.append({'run': scope.run, 'row_count': 0, 'is_in_interval': true, 'audit': audit.name}) -%}
        {%- endfor -%}
    {%- endif -%}
    {{ return(measured) }}
{% endmacro %}


{% macro _awap_audit_sql(options, scope) %}
    {#-
        Every audit's value for every staged period, as JSON, so that no driver guesses types.
        A period that is published within [from, to) and not staged any more counts as one of no rows.
    -#}
    {%- set changes = scope.audits | selectattr('type', 'equalto', 'change') | map(attribute='name') | list -%}
with staged as (
    select
        {{ lakehouse_patterns._awap_run_sql(scope) }} as run,
        count(*) as row_count,
        {{ 'coalesce(bool_and(' ~ scope.interval ~ '), false)' if scope.interval else 'true' }} as is_in_interval
        {%- for audit in scope.audits %},
        try_cast({{ lakehouse_patterns._awap_value_sql(audit, scope.types) }} as double) as value_{{ loop.index }}
        {%- endfor %}
    from {{ scope.rows }}
    {%- if scope.period %}
    group by {{ scope.period }}
    {%- endif %}
),

{% if scope.interval and scope.target -%}
emptied as (
    select distinct cast({{ scope.period }} as string) as run
    from {{ scope.target }}
    where {{ scope.interval }}
),

periods as (
    select
        coalesce(staged.run, emptied.run) as run,
        coalesce(staged.row_count, 0) as row_count,
        coalesce(staged.is_in_interval, emptied.run is not null) as is_in_interval
        {%- for audit in scope.audits %},
        staged.value_{{ loop.index }}
        {%- endfor %}
    from staged
    full outer join emptied on staged.run = emptied.run
),

{% else -%}
periods as (
    select * from staged
),

{% endif -%}
staged_values as (
    select
        run,
        row_count,
        is_in_interval,
        true as is_staged,
        audit,
        value
    from periods
    lateral view stack(
        {{ scope.audits | length }}
        {%- for audit in scope.audits %},
        {{ lakehouse_patterns.text_literal(audit.name) }}, value_{{ loop.index }}
        {%- endfor %}
    ) as audit, value
),

{{ lakehouse_patterns._awap_baselines_sql(options, scope, changes) }}

select to_json(struct(run, row_count, is_in_interval, audit, value, baseline)) as measured
from measured
{%- if scope.is_deleted %}

union all

select to_json(struct(cast({{ scope.period }} as string) as run, count(*) as row_count, true as is_in_interval)) as measured
from {{ scope.staged }}
group by {{ scope.period }}
having bool_and({{ scope.is_deleted }})
{%- endif %}
{% endmacro %}


{% macro _awap_baselines_sql(options, scope, changes) %}
    {#-
        Each staged value with the median of the periods before it: one exceptional period neither hides the next drop
        nor raises an alarm after it. Periods are in the order of their type, 10 after 9. A value that is NaN or infinite
        is none of the history.
    -#}
{%- if changes -%}
known_values as (
    select * from staged_values
    {%- if scope.results %}
    union all
    select
        run,
        cast(null as bigint) as row_count,
        true as is_in_interval,
        false as is_staged,
        audit,
        value
    from {{ scope.results }}
    where
        audit in ({{ lakehouse_patterns.text_literals(changes) }})
        and {{ lakehouse_patterns._is_finite_sql('value') }}
    {%- endif %}
),

-- A rerun compares with the periods before it, never with its own earlier result.
deduplicated as (
    select
        *,
        max(is_staged) over (partition by audit, run) as is_restaged
    from known_values
),

followed as (
    select
        *,
        array_sort(collect_list({{ lakehouse_patterns._finite_or_null_sql('value') }}) over (
            partition by audit order by try_cast(run as {{ scope.type }})
            rows between {{ options.history }} preceding and 1 preceding
        )) as earlier
    from deduplicated
    where is_staged or not is_restaged
),

measured as (
    select
        * except (earlier),
        (
            get(earlier, shiftright(size(earlier) - 1, 1))
            + get(earlier, shiftright(size(earlier), 1))
        ) / 2 as baseline
    from followed
    where is_staged
)
{%- else -%}
measured as (
    select
        *,
        cast(null as double) as baseline
    from staged_values
)
{%- endif -%}
{% endmacro %}


{% macro _awap_run_sql(scope, alias=none) %}
    {#- The period of a row as text, as audit results and rejects have it; without `period` the day of the run. -#}
    {%- if scope.period -%}
        {{ return('cast(' ~ (alias ~ '.' if alias else '') ~ scope.period ~ ' as string)') }}
    {%- endif -%}
    {{ return(lakehouse_patterns.text_literal(scope.run)) }}
{% endmacro %}


{% macro _awap_value_sql(audit, types) %}
    {#- The aggregate that an audit measures. -#}
    {%- if audit.type == 'row_count' -%}
        {{ return('count(*)') }}
    {%- elif audit.type == 'null_share' -%}
        {{ return('count_if(' ~ lakehouse_patterns._awap_field(audit, types) ~ ' is null)') }}
    {%- elif lakehouse_patterns._awap_rejects_rows(audit) -%}
        {{ return(
            'count_if(array_contains(lakehouse_patterns_rejected_by, ' ~ lakehouse_patterns.text_literal(audit.name) ~ '))'
        ) }}
    {%- elif audit.type == 'record' -%}
        {{ return('count_if((' ~ audit.valid_when ~ ') is not true)') }}
    {%- elif audit.type == 'contract' -%}
        {{ return('count_if((' ~ audit.condition ~ ') is not true' ~ audit.kept ~ ')') }}
    {%- endif -%}
    {{ return(audit.expression) }}
{% endmacro %}


{% macro _awap_field(audit, types) %}
    {#- A column, or a field of a struct as `column.field`. -#}
    {%- set known = lakehouse_patterns.column_name(types, audit.column) -%}
    {%- if known is not none -%}
        {{ return(lakehouse_patterns.quoted_name(known)) }}
    {%- endif -%}
    {%- set parts = audit.column.split('.') -%}
    {%- do lakehouse_patterns._awap_column(types, "column of audit '" ~ audit.name ~ "'", parts[0]) -%}
    {{ return(lakehouse_patterns.quoted_names(parts) | join('.')) }}
{% endmacro %}
