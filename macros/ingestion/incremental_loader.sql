{#-
    Incremental Loader in SQL: the predicate that gives a model the source rows of one window of ingestion time.

    The bounds are literals that the macro finds when the model is compiled. With a subquery over the target Spark would
    read every file of the source, because file statistics prune by literals only. The macro uses the first of these
    windows that applies:

    1. `window_from` and `window_to`, as arguments, `--vars` or options: that half-open window, for a backfill;
    2. the rows later than the target's newest value (`>`, because rows at the watermark are already loaded), or with
       `overlap` the rows from that long before the newest value (`>=`, for rows committed late: merge them on a key);
    3. for an absent or empty target and for a full refresh: all rows from `bootstrap_from` on.

    No window selects a row whose value is NULL; `incremental_rejects` selects these rows.

    A model that keeps few of the scanned rows (dead letters, a quarantine) names the scanned relation as `source`, and
    has the post-hook `incremental_watermark`. The model's newest row may be old, so the watermark is a property of its
    table: the newest value of the source when the run began, where the run's window ends too.
-#}

{% macro incremental_window(
    column=none, window_from=none, window_to=none, overlap=none, bootstrap_from=none, watermark_column=none, source=none
) %}
    {{ return(adapter.dispatch('incremental_window', 'lakehouse_patterns')(
        column, window_from, window_to, overlap, bootstrap_from, watermark_column, source
    )) }}
{% endmacro %}

{% macro default__incremental_window(
    column, window_from, window_to, overlap, bootstrap_from, watermark_column, source
) %}
    {%- set options = lakehouse_patterns._incremental_loader_options() -%}
    {%- set column = lakehouse_patterns._incremental_loader_column(column) -%}
    {%- set window_from = window_from or var('lakehouse_patterns_window_from', none) or options.window_from -%}
    {%- set window_to = window_to or var('lakehouse_patterns_window_to', none) or options.window_to -%}
    {%- set overlap = overlap or options.overlap -%}
    {%- set bootstrap_from = bootstrap_from or options.bootstrap_from -%}
    {%- do lakehouse_patterns.require(
        window_to or not window_from,
        'window_from needs window_to: without an end a backfill also reads all later rows'
    ) -%}

    {%- set end = lakehouse_patterns._moment('window_to', window_to) if window_to -%}
    {%- set operator = '>=' -%}
    {%- if window_from -%}
        {%- set start = lakehouse_patterns._moment('window_from', window_from) -%}
        {%- do lakehouse_patterns.require(
            start < end, 'window_from ' ~ window_from ~ ' must be before window_to ' ~ window_to
        ) -%}
    {%- else -%}
        {%- set watermark = lakehouse_patterns._watermark(
            lakehouse_patterns._watermark_column(watermark_column or options.watermark_column, column),
            has_own_watermark=source is not none
        ) -%}
        {%- if watermark is none -%}
            {%- set start = lakehouse_patterns._moment('bootstrap_from', bootstrap_from) if bootstrap_from -%}
        {%- elif overlap -%}
            {%- set start = watermark - lakehouse_patterns._duration('overlap', overlap) -%}
        {%- else -%}
            {%- set start = watermark -%}
            {%- set operator = '>' -%}
        {%- endif -%}
    {%- endif -%}

    {%- set bounds = [] -%}
    {%- if start -%}
        {%- do bounds.append(column ~ ' ' ~ operator ~ ' ' ~ lakehouse_patterns.timestamp_literal(start)) -%}
    {%- else -%}
        {%- do bounds.append(column ~ ' is not null') -%}
    {%- endif -%}
    {%- if end -%}
        {%- do bounds.append(column ~ ' < ' ~ lakehouse_patterns.timestamp_literal(end)) -%}
    {%- elif source is not none and execute -%}
        {%- do lakehouse_patterns._require_incremental_watermark() -%}
        {%- set newest = lakehouse_patterns._newest(column, source, where=bounds[0]) -%}
        {%- if newest is none -%}
            {#- Not (false): after a table's name Spark reads "where (false)" as an alias with a column's name. -#}
            {{ return('false') }}
        {%- endif -%}
        {%- do bounds.append(
            column ~ ' <= ' ~ lakehouse_patterns.timestamp_literal(newest) ~ lakehouse_patterns._watermark_mark()
        ) -%}
    {%- endif -%}
    {{ return('(' ~ bounds | join(' and ') ~ ')') }}
{% endmacro %}

{% macro incremental_watermark() %}
    {{ return(adapter.dispatch('incremental_watermark', 'lakehouse_patterns')()) }}
{% endmacro %}

{% macro default__incremental_watermark() %}
    {#-
        The end of the window is read from the statement that has just run, because the source may have newer rows by
        now. A run killed before this hook leaves an older watermark and newer rows in the table; the next run starts
        from the later of the two. A run with --empty has loaded no row of its window.
    -#}
    {%- if not execute or lakehouse_patterns.is_empty_run() -%}
        {{ return('') }}
    {%- endif -%}
    {%- set ends = modules.re.findall(
        "timestamp '([^']+)'" ~ modules.re.escape(lakehouse_patterns._watermark_mark()), sql
    ) | unique | list -%}
    {%- do lakehouse_patterns.require(
        ends | length <= 1,
        'several windows of the model have source, but a model has one watermark: give source to one window'
    ) -%}
    {{ return(
        'alter table ' ~ this ~ " set tblproperties ('lakehouse_patterns.watermark' = '" ~ ends[0] ~ "')" if ends else ''
    ) }}
{% endmacro %}

{% macro incremental_rejects(column=none) %}
    {{ return(adapter.dispatch('incremental_rejects', 'lakehouse_patterns')(column)) }}
{% endmacro %}

{% macro default__incremental_rejects(column) %}
    {{ return('(' ~ lakehouse_patterns._incremental_loader_column(column) ~ ' is null)') }}
{% endmacro %}

{% macro incremental_groups(relation, by, column=none) %}
    {{ return(adapter.dispatch('incremental_groups', 'lakehouse_patterns')(relation, by, column)) }}
{% endmacro %}

{% macro default__incremental_groups(relation, by, column) %}
    {#- The groups that new rows touch, for a model that recomputes whole groups. -#}
    {%- set groups = lakehouse_patterns.quoted_names(lakehouse_patterns.as_list(by)) -%}
    {%- set column = lakehouse_patterns._incremental_loader_column(column) -%}
    {%- do lakehouse_patterns.require_free_names(
        lakehouse_patterns.as_list(by), [column | replace('`', '')], 'incremental_groups',
        'leave it out of by, whose groups have its newest value'
    ) -%}
    {%- do lakehouse_patterns.require(groups, 'incremental_groups needs by: the column or columns of a group') -%}
select
    {{ groups | join(',\n    ') }},
    max({{ column }}) as {{ column }}
from {{ relation }}
where
    {{ groups | join(' is not null\n    and ') }} is not null
    and {{ lakehouse_patterns.incremental_window(column) }}
group by {{ groups | join(', ') }}
{%- endmacro %}

{% macro current_lines(lines, files) %}
    {{ return(adapter.dispatch('current_lines', 'lakehouse_patterns')(lines, files)) }}
{% endmacro %}

{% macro default__current_lines(lines, files) %}
    {#- Bronze only appends: of a file that landed again, only the highest load counts. -#}
with current_loads as (
    select
        file_path,
        max(load_id) as load_id
    from {{ files }}
    group by file_path
)

select all_lines.*
from {{ lines }} as all_lines
inner join current_loads
    on all_lines.file_path = current_loads.file_path
    and all_lines.load_id = current_loads.load_id
{%- endmacro %}

{% macro _incremental_loader_options() %}
    {#- While dbt parses, a model's own config isn't known yet; outside a model there is none. -#}
    {%- set options = (lakehouse_patterns.options('incremental_loader') if this is defined else none) or {} -%}
    {%- do lakehouse_patterns.require_pattern_options('incremental_loader', options) -%}
    {{ return(options) }}
{% endmacro %}

{% macro _incremental_loader_column(column) %}
    {%- set column = column or lakehouse_patterns._incremental_loader_options().column -%}
    {%- do lakehouse_patterns.require(
        column or not execute,
        'name the delta column: as the argument column, or as meta.lakehouse_patterns.incremental_loader.column'
    ) -%}
    {{ return(column or 'true') }}
{% endmacro %}

{% macro _watermark_column(name, column) %}
    {#- The target's column, quoted: by its name, or the one that `column` names in SQL (``at``, ``t.`Read At` ``). -#}
    {%- set parts = modules.re.fullmatch('(?:.*[.])?(?:(\\w+)|`((?:[^`]|``)+)`)', name or column) -%}
    {%- if name and not parts -%}
        {{ return(lakehouse_patterns.quoted_name(name)) }}
    {%- endif -%}
    {%- do lakehouse_patterns.require(
        parts, "'" ~ column ~ "' is an expression: name the target's column that holds it as watermark_column"
    ) -%}
    {{ return(lakehouse_patterns.quoted_name(parts[1] or parts[2] | replace('``', '`'))) }}
{% endmacro %}

{% macro _watermark(name, has_own_watermark) %}
    {#- The watermark of the target; none if the target is absent, rebuilt, or empty without a watermark property. -#}
    {%- if not execute or this is not defined or not lakehouse_patterns.is_incremental() -%}
        {{ return(none) }}
    {%- endif -%}
    {%- set known = [
        lakehouse_patterns._newest(name, this), lakehouse_patterns._own_watermark() if has_own_watermark
    ] | select | list -%}
    {{ return(known | max if known else none) }}
{% endmacro %}

{% macro _newest(column, relation, where='true') %}
    {#- unix_micros takes timestamps only: a text column fails here, where a cast to NULL would reload everything. -#}
    {%- set newest = run_query(
        'select unix_micros(max(' ~ column ~ ')) as micros from ' ~ relation ~ ' where ' ~ where
    ).rows[0][0] -%}
    {%- if newest is none -%}
        {{ return(none) }}
    {%- endif -%}
    {{ return(
        modules.datetime.datetime(1970, 1, 1) + modules.datetime.timedelta(microseconds=newest | int)
    ) }}
{% endmacro %}

{% macro _own_watermark() %}
    {%- set value = lakehouse_patterns.table_property(this, 'lakehouse_patterns.watermark') -%}
    {{ return(lakehouse_patterns._moment('watermark', value) if value else none) }}
{% endmacro %}

{% macro _watermark_mark() %}
    {{ return(' /* watermark */') }}
{% endmacro %}

{% macro _require_incremental_watermark() %}
    {#- Without the hook each run would silently scan the same rows again. -#}
    {%- do lakehouse_patterns.require(
        'incremental_watermark' in (model.config.get('post-hook') or []) | map(attribute='sql') | join,
        "source needs the model's post_hook '{{ lakehouse_patterns.incremental_watermark() }}'"
    ) -%}
{% endmacro %}
