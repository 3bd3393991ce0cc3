{#-
    SCD Type 2 from a change feed.

    Every row of the target stands for a run of source changes and keeps them in `changes`, so the feed can be
    rebuilt from the table: a late change is put where it belongs, both neighbours are mended, and the result
    depends on the set of changes alone, never on how they were split into batches or on the batches' order.
    Without that list a late B between A at 1 and an unchanged A at 5 could not know that A returns at 5.

    A batch rebuilds the chains of its own keys and writes the rows that differ in one MERGE.
-#}

{% materialization scd2, adapter='spark', supported_languages=['sql'] %}
    {%- set target_relation = this -%}
    {%- set existing_relation = load_relation(this) -%}
    {%- set batch = lakehouse_patterns.batch_view(this) -%}
    {%- do lakehouse_patterns.require(
        config.get('file_format') == 'delta',
        "materialized='scd2' needs file_format='delta', got '" ~ config.get('file_format') ~ "'"
    ) -%}

    {{ run_hooks(pre_hooks) }}

    {%- call statement('create_batch_view') -%}
        {{ create_temporary_view(batch, compiled_code) }}
    {%- endcall -%}
    {%- set history = lakehouse_patterns._scd2_history(adapter.get_columns_in_relation(batch)) -%}
    {%- do lakehouse_patterns.quarantine_incomplete(history.incomplete, batch) -%}

    {%- if existing_relation is none or existing_relation.is_view or should_full_refresh() -%}
        {%- if existing_relation is not none and not (existing_relation.is_table and existing_relation.is_delta) -%}
            {%- do adapter.drop_relation(existing_relation) -%}
        {%- endif -%}
        {%- call statement('main') -%}
            {{ create_table_as(false, target_relation, lakehouse_patterns._scd2_rows(history, batch)) }}
        {%- endcall -%}
        {%- do persist_constraints(target_relation, model) -%}
    {%- else -%}
        {%- do lakehouse_patterns.require(
            existing_relation.is_delta, existing_relation ~ ' is not a Delta table; rebuild it with --full-refresh'
        ) -%}
        {%- set history = lakehouse_patterns._scd2_follow_schema(history, existing_relation) -%}
        {%- call statement('main') -%}
            {{ lakehouse_patterns._scd2_merge(history, batch, target_relation) }}
        {%- endcall -%}
    {%- endif -%}
    {%- call statement('drop_batch_view') -%}
        drop view if exists {{ batch }}
    {%- endcall -%}

    {%- do apply_grants(
        target_relation, config.get('grants'), should_revoke(existing_relation, should_full_refresh())
    ) -%}
    {%- do persist_docs(target_relation, model) -%}

    {{ run_hooks(post_hooks) }}

    {{ return({'relations': [target_relation]}) }}
{% endmaterialization %}


{% macro _scd2_own_columns() %}
    {{ return(['effective_from', 'effective_to', 'is_current', 'closed_by_delete', 'changes']) }}
{% endmacro %}


{% macro _scd2_history(batch_columns) %}
    {#-
        The checked configuration of the current model, with the batch's columns sorted by what they are:
        key, tracked and untracked map column names to data types. A change without a key belongs to nobody and one
        without a time has no place in the history: `incomplete` holds the rules for both.
    -#}
    {%- set options = lakehouse_patterns.options('scd2') or {} -%}
    {%- do lakehouse_patterns.require_known_keys(
        'meta.lakehouse_patterns.scd2',
        options,
        ['changed_at', 'sequence', 'is_deleted', 'tracked_columns', 'on_null_key']
    ) -%}
    {%- set key_names = lakehouse_patterns.as_list(config.get('unique_key')) -%}
    {%- do lakehouse_patterns.require(
        key_names | length > 0, "materialized='scd2' needs unique_key: the column or columns that identify an entity"
    ) -%}
    {%- do lakehouse_patterns.require(
        options.get('changed_at'),
        "meta.lakehouse_patterns.scd2 needs changed_at: the column with the time of the change in the source"
    ) -%}
    {%- set on_null_key = options.get('on_null_key', 'fail') -%}
    {%- do lakehouse_patterns.require_one_of('on_null_key', on_null_key, ['fail', 'quarantine']) -%}

    {%- set types = {} -%}
    {%- for column in batch_columns -%}
        {%- do types.update({column.name: column.dtype}) -%}
    {%- endfor -%}
    {%- set tracked_names = lakehouse_patterns.as_list(options.get('tracked_columns')) -%}
    {%- set feed_columns = [options.changed_at, options.get('sequence'), options.get('is_deleted')] | select | list -%}
    {%- for name in key_names + feed_columns + tracked_names -%}
        {%- do lakehouse_patterns.require(
            name in types, "the model has no column '" ~ name ~ "'; it has: " ~ (types | join(', '))
        ) -%}
    {%- endfor -%}
    {%- for name in lakehouse_patterns._scd2_own_columns() -%}
        {%- do lakehouse_patterns.require(
            name not in types or name in feed_columns,
            "the model's column '" ~ name ~ "' has a name that materialized='scd2' gives to a column of its own"
        ) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require(
        types[options.changed_at] in ['timestamp', 'timestamp_ntz', 'date'],
        "changed_at must be a timestamp or a date, '" ~ options.changed_at ~ "' is a " ~ types[options.changed_at]
    ) -%}
    {%- if options.get('is_deleted') -%}
        {%- do lakehouse_patterns.require(
            types[options.is_deleted] == 'boolean',
            "is_deleted must be a boolean, '" ~ options.is_deleted ~ "' is a " ~ types[options.is_deleted]
        ) -%}
    {%- endif -%}

    {%- set key, tracked, untracked = {}, {}, {} -%}
    {%- for name, dtype in types.items() -%}
        {%- if name in key_names -%}
            {%- do key.update({name: dtype}) -%}
        {%- elif name in feed_columns -%}
        {%- elif not tracked_names or name in tracked_names -%}
            {%- do tracked.update({name: dtype}) -%}
        {%- else -%}
            {%- do untracked.update({name: dtype}) -%}
        {%- endif -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require(
        tracked | length > 0, "materialized='scd2' has no column to track: the model selects only " ~ (types | join(', '))
    ) -%}
    {{ return({
        'key': key,
        'tracked': tracked,
        'untracked': untracked,
        'absent': [],
        'changed_at': options.changed_at,
        'changed_at_type': types[options.changed_at],
        'sequence': options.get('sequence'),
        'sequence_type': types.get(options.get('sequence')),
        'is_deleted': options.get('is_deleted'),
        'incomplete': {
            'relation': this,
            'types': types,
            'partitions': [],
            'key': key_names,
            'nullable_key': [],
            'sequence': [options.changed_at],
            'is_deleted': none,
            'on_null_key': on_null_key
        }
    }) }}
{% endmacro %}


{% macro _scd2_follow_schema(history, target) %}
    {#-
        Bring the model's columns and the table's together as `on_schema_change` says, before anything is read.
        Returns the history with the table's columns in the table's order.
    -#}
    {%- set mode = config.get('on_schema_change') or 'ignore' -%}
    {%- do lakehouse_patterns.require(
        mode in ['ignore', 'append_new_columns', 'fail'],
        "on_schema_change of materialized='scd2' must be one of ignore, append_new_columns, fail, got '" ~ mode
        ~ "' (dropping a column would drop history)"
    ) -%}
    {%- set refresh = '; change the model, or rebuild the table from the whole feed with --full-refresh' -%}
    {%- set stored = {} -%}
    {%- for column in adapter.get_columns_in_relation(target) -%}
        {%- do stored.update({column.name: column.dtype}) -%}
    {%- endfor -%}
    {%- for name in (history.key | list) + lakehouse_patterns._scd2_own_columns() -%}
        {%- do lakehouse_patterns.require(
            name in stored, target ~ " has no column '" ~ name ~ "' as an scd2 table of this model has" ~ refresh
        ) -%}
    {%- endfor -%}

    {%- set attributes = {} -%}
    {%- do attributes.update(history.tracked) -%}
    {%- do attributes.update(history.untracked) -%}
    {%- set expected = {'effective_from': history.changed_at_type} -%}
    {%- do expected.update(history.key) -%}
    {%- do expected.update(attributes) -%}
    {%- for name, dtype in expected.items() if name in stored -%}
        {#- `describe` cuts long struct types short. -#}
        {%- do lakehouse_patterns.require(
            dtype == stored[name] or ' more fields' in dtype,
            "column '" ~ name ~ "' is a " ~ stored[name] ~ ' in ' ~ target ~ ', the model gives a ' ~ dtype ~ refresh
        ) -%}
    {%- endfor -%}

    {%- set known, absent, tracked, untracked = [], [], {}, {} -%}
    {%- for name, dtype in stored.items() if name not in lakehouse_patterns._scd2_own_columns() -%}
        {%- if name not in history.key -%}
            {%- do known.append(name) -%}
            {%- do absent.append(name) if name not in attributes -%}
            {%- do (untracked if name in history.untracked else tracked).update({name: dtype}) -%}
        {%- endif -%}
    {%- endfor -%}
    {%- set changes_type = lakehouse_patterns._scd2_changes_type(history, untracked) -%}
    {%- do lakehouse_patterns.require(
        stored['changes'] == changes_type or ' more fields' in stored['changes'],
        'sequence or tracked_columns differ from those that ' ~ target ~ ' was built with (changes is '
        ~ stored['changes'] ~ ', the model needs ' ~ changes_type ~ ')' ~ refresh
    ) -%}

    {%- set added = [] -%}
    {%- for name in attributes if name not in known -%}
        {%- do added.append(name) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require(
        not (mode == 'fail' and (added or absent)),
        'on_schema_change is fail and the columns differ: new in the model ' ~ added ~ ', absent from it ' ~ absent
    ) -%}
    {%- do lakehouse_patterns.require(
        mode == 'append_new_columns' or not absent,
        'the model no longer selects ' ~ (absent | join(', ')) ~ ", which " ~ target
        ~ ' tracks; on_schema_change=append_new_columns takes it as NULL from now on'
    ) -%}
    {%- if mode == 'append_new_columns' and added -%}
        {%- set definitions = [] -%}
        {%- for name in added if name in history.tracked -%}
            {%- do tracked.update({name: attributes[name]}) -%}
            {%- do definitions.append(adapter.quote(name) ~ ' ' ~ attributes[name]) -%}
        {%- endfor -%}
        {%- for name in added if name in history.untracked -%}
            {%- do lakehouse_patterns.require(
                untracked, "'" ~ name ~ "' would be the first untracked column of " ~ target ~ refresh
            ) -%}
            {%- do untracked.update({name: attributes[name]}) -%}
            {%- do definitions.append(adapter.quote(name) ~ ' ' ~ attributes[name]) -%}
            {%- do definitions.append(
                'changes.element.untracked.' ~ adapter.quote(name) ~ ' ' ~ attributes[name]
            ) -%}
        {%- endfor -%}
        {%- do run_query('alter table ' ~ target ~ ' add columns (' ~ (definitions | join(', ')) ~ ')') -%}
    {%- endif -%}
    {%- do history.update({'tracked': tracked, 'untracked': untracked, 'absent': absent}) -%}
    {{ return(history) }}
{% endmacro %}


{% macro _scd2_changes_type(history, untracked) %}
    {#- The data type of `changes`, as `describe` writes it. -#}
    {%- set fields = ['changed_at:' ~ history.changed_at_type] -%}
    {%- do fields.append('sequence:' ~ history.sequence_type) if history.sequence -%}
    {%- do fields.append('is_deleted:boolean') -%}
    {%- if untracked -%}
        {%- set inner = [] -%}
        {%- for name, dtype in untracked.items() -%}
            {%- do inner.append(name ~ ':' ~ dtype) -%}
        {%- endfor -%}
        {%- do fields.append('untracked:struct<' ~ (inner | join(',')) ~ '>') -%}
    {%- endif -%}
    {{ return('array<struct<' ~ (fields | join(',')) ~ '>>') }}
{% endmacro %}


{% macro _scd2_attributes(history, columns, source='') %}
    {#- The columns as one struct: `<=>` and `order by` on it are NULL-safe and total. -#}
    {%- set fields = [] -%}
    {%- for name, dtype in columns.items() -%}
        {%- if name in history.absent and not source -%}
            {%- do fields.append('cast(null as ' ~ dtype ~ ') as ' ~ adapter.quote(name)) -%}
        {%- else -%}
            {%- do fields.append(source ~ adapter.quote(name)) -%}
        {%- endif -%}
    {%- endfor -%}
    {{ return('struct(' ~ (fields | join(', ')) ~ ')') }}
{% endmacro %}


{% macro _scd2_rows(history, batch, target=none) %}
    {#-
        The rows of the batch's keys. Without a target: all of them, from the batch alone. With one: rebuilt from
        the batch and what the target holds of its keys, and only the rows that differ from the target's.
        `starts_at`, the time of a row's first change, identifies the row within its key; without `starts_row`
        it is a row of the target that no change starts any more.
    -#}
    {%- set keys, key_matches = [], [] -%}
    {%- for name in history.key -%}
        {%- do keys.append('key_' ~ loop.index) -%}
        {%- do key_matches.append('stored.' ~ adapter.quote(name) ~ ' = arrived.key_' ~ loop.index) -%}
    {%- endfor -%}
    {%- set entity = keys | join(', ') -%}
    {%- set sequence = ['sequence'] if history.sequence else [] -%}
    {%- set untracked = ['untracked'] if history.untracked else [] -%}
    {%- set change = (['changed_at'] + sequence + ['is_deleted'] + untracked) | join(', ') -%}
    {%- set rank = (sequence + ['is_deleted', 'tracked'] + untracked) | join(', ') -%}
    {%- set deleted = 'coalesce(' ~ adapter.quote(history.is_deleted) ~ ', false)' if history.is_deleted else 'false' -%}
    {%- set stored_tracked = lakehouse_patterns._scd2_attributes(history, history.tracked, 'stored.') -%}
with arrived as (
    select
        {%- for name in history.key %}
        {{ adapter.quote(name) }} as key_{{ loop.index }},
        {%- endfor %}
        {{ adapter.quote(history.changed_at) }} as changed_at,
        {%- if history.sequence %}
        {{ adapter.quote(history.sequence) }} as sequence,
        {%- endif %}
        {#- In a column that nothing filters on, or the optimizer would ask before quarantined rows are left out. #}
        case
            when {{ lakehouse_patterns.is_incomplete(history.incomplete, 'batch') }}
                then {{ lakehouse_patterns.refuse_incomplete(history.incomplete, 'batch', 'change') }}
            else {{ deleted }}
        end as is_deleted,
        if({{ deleted }}, null, {{ lakehouse_patterns._scd2_attributes(history, history.tracked) }}) as tracked,
        {%- if history.untracked %}
        {{ lakehouse_patterns._scd2_attributes(history, history.untracked) }} as untracked,
        {%- endif %}
        null as stored_row
    from {{ batch }} as batch
    {{- lakehouse_patterns.without_quarantined(history.incomplete, 'batch') | indent(4) }}
    {%- if not target %}
    {#- As the windows want it; and no check fails inside the task that writes, under a stack trace. #}
    distribute by {{ entity }}
    {%- endif %}
),

{% if target -%}
stored_changes as (
    select
        {%- for name in history.key %}
        stored.{{ adapter.quote(name) }} as key_{{ loop.index }},
        {%- endfor %}
        change.changed_at,
        {%- if history.sequence %}
        change.sequence,
        {%- endif %}
        change.is_deleted,
        if(change.is_deleted, null, {{ stored_tracked }}) as tracked,
        {%- if history.untracked %}
        change.untracked,
        {%- endif %}
        if(
            position = 0,
            struct(
                if(change.is_deleted, null, {{ stored_tracked }}) as tracked,
                stored.effective_to as effective_to,
                stored.changes as changes
            ),
            null
        ) as stored_row
    from {{ target }} as stored
    left semi join arrived
        on {{ key_matches | join(' and ') }}
    lateral view posexplode(stored.changes) as position, change
),

{% endif -%}
all_changes as (
    select * from arrived
    {%- if target %}
    union all
    select * from stored_changes
    {%- endif %}
),

-- Of the changes of one key at one time only the last one ever takes effect; attributes break the last ties.
effective_changes as (
    select
        {{ entity }},
        changed_at,
        max(struct({{ rank }})) as last_change,
        max(stored_row) as stored_row
    from all_changes
    group by {{ entity }}, changed_at
),

compared as (
    select
        {{ entity }},
        changed_at,
        last_change.*,
        stored_row,
        not last_change.is_deleted and not last_change.tracked <=> lag(last_change.tracked) over chain as opens_version,
        row_number() over chain = 1 as is_first
    from effective_changes
    window chain as (partition by {{ entity }} order by changed_at)
),

numbered as (
    select
        *,
        count_if(opens_version) over (partition by {{ entity }} order by changed_at) as version
    from compared
),

folded as (
    select
        *,
        min(if(is_deleted, changed_at, null)) over same_version as deleted_at,
        {%- if history.untracked %}
        max_by(untracked, changed_at) filter (where not is_deleted) over same_version as latest_untracked,
        {%- endif %}
        array_sort(collect_list(struct({{ change }})) over same_version) as changes
    from numbered
    window same_version as (partition by {{ entity }}, version)
),

bounded as (
    select
        *,
        opens_version or is_first as starts_row,
        coalesce(
            deleted_at,
            lead(if(opens_version, changed_at, null)) ignore nulls over (partition by {{ entity }} order by changed_at)
        ) as effective_to
    from folded
    where opens_version or is_first or stored_row is not null
)

select
    {%- for name in history.key %}
    key_{{ loop.index }} as {{ adapter.quote(name) }},
    {%- endfor %}
    {%- for name in history.tracked %}
    tracked.{{ adapter.quote(name) }},
    {%- endfor %}
    {%- for name in history.untracked %}
    latest_untracked.{{ adapter.quote(name) }},
    {%- endfor %}
    if(opens_version, changed_at, null) as effective_from,
    effective_to,
    effective_to is null as is_current,
    deleted_at is not null as closed_by_delete,
    changes
    {%- if target %},
    changed_at as starts_at,
    starts_row
    {%- endif %}
from bounded
{%- if target %}
where not starts_row or not stored_row <=> struct(tracked, effective_to, changes)
{%- endif %}
{%- endmacro %}


{% macro _scd2_merge(history, batch, target) %}
    {#- One MERGE of the rows that differ: a rerun has none and rewrites no file. -#}
    {%- set columns = (history.key | list) + (history.tracked | list) + (history.untracked | list)
        + lakehouse_patterns._scd2_own_columns() -%}
    {%- set matches, names, assignments, values = [], [], [], [] -%}
    {%- for name in history.key -%}
        {%- do matches.append('stored.' ~ adapter.quote(name) ~ ' = rebuilt.' ~ adapter.quote(name)) -%}
    {%- endfor -%}
    {%- for name in columns -%}
        {%- do names.append(adapter.quote(name)) -%}
        {%- do values.append('rebuilt.' ~ adapter.quote(name)) -%}
        {%- do assignments.append(adapter.quote(name) ~ ' = rebuilt.' ~ adapter.quote(name)) -%}
    {%- endfor -%}
merge into {{ target }} as stored
using (
    {{ lakehouse_patterns._scd2_rows(history, batch, target) | indent(4) }}
) as rebuilt
    on
        {{ matches | join('\n        and ') }}
        and coalesce(stored.effective_from, stored.effective_to) = rebuilt.starts_at
when matched and not rebuilt.starts_row then delete
when matched then update set
    {{ assignments | join(',\n    ') }}
when not matched then insert (
    {{ names | join(',\n    ') }}
) values (
    {{ values | join(',\n    ') }}
)
{%- endmacro %}


{% macro as_of(timestamp, versions=none, effective_from='effective_from', effective_to='effective_to') %}
    {{ return(adapter.dispatch('as_of', 'lakehouse_patterns')(timestamp, versions, effective_from, effective_to)) }}
{% endmacro %}

{% macro default__as_of(timestamp, versions=none, effective_from='effective_from', effective_to='effective_to') %}
    {#- Validity is half-open: at the instant of a change the new version holds. -#}
    {%- set prefix = versions ~ '.' if versions else '' -%}
(
    {{ prefix }}{{ effective_from }} <= {{ timestamp }}
    and ({{ prefix }}{{ effective_to }} > {{ timestamp }} or {{ prefix }}{{ effective_to }} is null)
)
{%- endmacro %}


{% test scd_type_2_invariants(
    model,
    unique_key,
    effective_from='effective_from',
    effective_to='effective_to',
    is_current=none,
    gap_allowed_when='closed_by_delete'
) %}
    {#- Fails with one row for each broken rule of a version: key, validity and the rule's name. -#}
    {%- set keys = lakehouse_patterns.as_list(unique_key) -%}
    {%- do lakehouse_patterns.require(keys | length > 0, 'scd_type_2_invariants needs unique_key') -%}
    {%- set entity = keys | join(', ') -%}
with chained as (
    select
        {{ entity }},
        {{ effective_from }} as effective_from,
        {{ effective_to }} as effective_to,
        {{ is_current if is_current else effective_to ~ ' is null' }} as is_current,
        coalesce({{ gap_allowed_when }}, false) as gap_allowed,
        lead({{ effective_from }}) over by_start as next_from,
        row_number() over by_start = count(*) over by_key as is_last,
        row_number() over by_start = 1 as is_first,
        count_if({{ is_current if is_current else effective_to ~ ' is null' }}) over by_key as current_versions
    from {{ model }}
    window
        by_key as (partition by {{ entity }}),
        by_start as (
            partition by {{ entity }} order by {{ effective_from }} asc nulls first, {{ effective_to }} asc nulls last
        )
),

judged as (
    select
        *,
        array_compact(array(
            case when {% for key in keys %}{{ key }} is null{{ ' or ' if not loop.last }}{% endfor %} then 'null key' end,
            case when effective_from is null and not (is_first and gap_allowed) then 'unknown start' end,
            case when effective_from >= effective_to then 'start not before end' end,
            case when is_current is distinct from (effective_to is null) then 'current and open differ' end,
            case when effective_from <=> next_from and not is_last then 'start not unique' end,
            case when effective_to is null and not is_last then 'open before the last version' end,
            case when effective_to > next_from then 'overlap' end,
            case when effective_to < next_from and not gap_allowed then 'gap' end,
            case when is_last and current_versions > 1 then 'several current versions' end,
            case when is_last and current_versions = 0 and not gap_allowed then 'no current version' end
        )) as broken_rules
    from chained
)

select
    {{ entity }},
    effective_from,
    effective_to,
    explode(broken_rules) as broken_rule
from judged
{% endtest %}
